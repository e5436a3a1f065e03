"""What `make size` counts."""

import re

import pytest

from tests.size import PYTHON, C, tokens


@pytest.mark.parametrize(
    ("language", "text", "count"),
    [
        (PYTHON, 'def f(a):\n    """What\n\n    it is."""\n    return a  # why\n', 8),
        (PYTHON, "f(\n    a,\n    b,\n)\n", 6),
        (PYTHON, "f(a, b)\n", 6),
        (PYTHON, "text = 'many words are one'", 3),
        (PYTHON, 'program = """\nint main(void) { return 0; }\n"""\n', 12),
        (C, "/* why */ a->b = '\"'; // it's\nc += 1.5;\n", 10),
        (C, 'f("a \\" b", d);', 7),
    ],
)
def test_comments_docstrings_and_layout_count_nothing(
    language: re.Pattern[str], text: str, count: int
) -> None:
    assert tokens(text, language) == count
