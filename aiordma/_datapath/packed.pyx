# Validates msgpack data before any object is created from it, and limits the cost of creating the
# objects. A single byte from the peer can become a list of 56 bytes, and a Timestamp takes a
# microsecond to create. The tables follow the "Formats" section of the msgpack specification.

from cpython.buffer cimport PyBUF_SIMPLE, Py_buffer, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int64_t, uint64_t

cdef enum:
    # Reading a message of cost MAX_WORK takes an estimated 0.1 s. An element of a container costs
    # 1, and more if it is a container or an extension value itself.
    MAX_WORK = 1 << 20
    CONTAINER = 4
    EXTENSION = 32
    MAX_NESTED = 511  # the limit of msgpack.packb

cdef enum:  # values of `is_key`
    IS_VALUE = 0
    IS_KEY = 1

# Tables for the tags 0xc0 to 0xdf, indexed by tag - 0xc0. KINDS: (P)lain, (B)ytes or text,
# (E)xtension, (A)rray, (M)ap, or - for the invalid tag. LENGTHS: the size of the length field in
# bytes. SIZES: the number of fixed bytes that follow the length field.
cdef const char *KINDS = b"P-PPBBBEEEPPPPPPPPPPEEEEEBBBAAMM"
cdef const char *LENGTHS = (
    b"\0\0\0\0\1\2\4\1\2\4\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\1\2\4\2\4\2\4"
)
cdef const char *SIZES = (
    b"\0\0\0\0\0\0\0\1\1\1\4\x08\1\2\4\x08\1\2\4\x08\2\3\5\x09\x11\0\0\0\0\0\0\0"
)


cdef class Values:
    """A cursor that validates and skips msgpack values."""

    cdef const unsigned char *position
    cdef const unsigned char *end
    cdef int64_t remaining_work

    cdef int spend(self, int64_t cost) except -1:
        self.remaining_work -= cost
        if self.remaining_work < 0:
            raise ValueError(
                "too many values: a message can contain at most a million numbers, or 200,000 "
                "lists and dicts"
            )
        return 0

    cdef int skip(self, int depth, bint is_key) except -1:
        """Validate the value at the position, including its elements, and move behind it.

        `kind` is a letter of KINDS. `length` and `size` are values of LENGTHS and SIZES.
        """
        cdef unsigned char tag, kind = b"P"
        cdef uint64_t count = 0, i
        cdef int length = 0, size = 0
        if self.position == self.end:
            raise ValueError("truncated data")
        tag = self.position[0]
        self.position += 1
        if tag >= 0xc0 and tag < 0xe0:
            kind, length, size = KINDS[tag - 0xc0], LENGTHS[tag - 0xc0], SIZES[tag - 0xc0]
        elif tag >= 0xa0 and tag < 0xe0:
            kind, count = b"B", tag & 31
        elif tag >= 0x80 and tag < 0xa0:
            kind, count = b"A" if tag & 16 else b"M", tag & 15
        if self.end - self.position < length:
            raise ValueError("truncated data")
        for i in range(<uint64_t> length):
            count = count << 8 | self.position[i]
        self.position += length
        if is_key and kind != b"B":
            raise ValueError("dict keys must be str or bytes")
        if kind == b"A" or kind == b"M":
            if depth == MAX_NESTED:
                raise ValueError(f"lists or dicts are nested more than {MAX_NESTED} deep")
            self.spend(CONTAINER + (count if kind == b"A" else 2 * count))
            for i in range(count):
                if kind == b"M":
                    self.skip(depth + 1, IS_KEY)
                self.skip(depth + 1, IS_VALUE)
            return 0
        if kind == b"-":
            raise ValueError("invalid byte 0xc1")
        if kind == b"E":
            self.spend(EXTENSION)
        if <uint64_t> (self.end - self.position) < count + size:
            raise ValueError("truncated data")
        self.position += count + size
        return 0


def check_packed(data: Buffer) -> None:
    """Raise ValueError unless `data` is exactly one value that msgpack can read in a limited time.

    Keys of dicts must be str or bytes, because other keys can be chosen to make a dict slow.
    """
    cdef Values values = Values.__new__(Values)
    cdef Py_buffer buffer
    PyObject_GetBuffer(data, &buffer, PyBUF_SIMPLE)
    try:
        values.position = <const unsigned char *> buffer.buf
        values.end = values.position + buffer.len
        values.remaining_work = MAX_WORK
        values.skip(0, IS_VALUE)
        if values.position != values.end:
            raise ValueError("extra bytes after the end")
    finally:
        PyBuffer_Release(&buffer)
