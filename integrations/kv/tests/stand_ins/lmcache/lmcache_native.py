class Bitmap:
    """Bits that are 0 until they are set."""

    def __init__(self, size: int) -> None:
        self._bits = [False] * size

    def set(self, index: int) -> None:
        self._bits[index] = True

    def test(self, index: int) -> bool:
        return self._bits[index]

    def size(self) -> int:
        return len(self._bits)
