"""Tests of the pages in docs/: programs run, names exist, generated parts are current."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import aiordma
from tests.docs.pages import DOCS, ROOT, differing, pages
from tests.processes import run, run_python

FOLDERS = (DOCS, ROOT / "softdev" / "docs")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "softdev" / "README.md"]
PAGES += sorted(page for folder in FOLDERS for page in folder.rglob("*.md"))
# Pages whose programs are run by other tests.
OTHERS = [ROOT / "SECURITY.md", *sorted(ROOT.glob("integrations/*/README.md"))]
PACKAGE = ROOT / "aiordma"

# Matches a program, and its output if a text block follows directly.
PROGRAM = re.compile(
    r"^```python\n(?P<program>.*?)^```\n(?:\n```text\n(?P<output>.*?)^```$)?",
    re.DOTALL | re.MULTILINE,
)
EXAMPLES = {path.read_text() for path in (ROOT / "examples").rglob("*.py")}  # tests/examples
PROGRAMS = [
    pytest.param(match["program"], match["output"] or "", id=f"{page.stem}-{number}")
    for page in PAGES
    if page.parent in FOLDERS
    for number, match in enumerate(PROGRAM.finditer(page.read_text()))
    if not re.search(r"^import (pytest|unittest)$", match["program"], re.MULTILINE)
    and match["program"] not in EXAMPLES
]

# Matches a pytest test and its configuration. softdev/tests/programs runs the unittest tests.
TESTS = re.compile(
    r"^```python\n(?P<program>[^`]*^import pytest$[^`]*)^```\n\n```toml\n(?P<toml>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


@pytest.mark.parametrize(("program", "output"), PROGRAMS)
def test_programs_on_pages_print_the_documented_output(program: str, output: str) -> None:
    """The programs run on the embedded device, with warnings as errors."""
    done = run_python("-W", "error", "-c", program, AIORDMA_DEVICE="embedded0")
    assert (done.stdout, done.stderr, done.returncode) == (output, "", 0)


def test_tests_on_the_testing_page_pass(tmp_path: Path) -> None:
    match = TESTS.search((DOCS / "testing.md").read_text())
    assert match
    (tmp_path / "test_counting.py").write_text(match["program"])
    (tmp_path / "pyproject.toml").write_text(match["toml"])
    done = run_python(
        "-m",
        "pytest",
        "-q",
        "--confcutdir=.",
        "-Wignore::pytest.PytestAssertRewriteWarning",  # of the editable install
        cwd=tmp_path,
        AIORDMA_DEVICE="embedded0",
        PYTHONPATH=str(ROOT),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=lambda page: str(page.relative_to(ROOT)))
def test_page_links_lead_to_existing_files_and_anchors(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if ":" in path:
            continue
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{page.name} links to {target}"
        if anchor and there.suffix == ".md":
            assert anchor in anchors(there.read_text()), f"{page.name} links to {target}"


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub derives from headings, and explicit HTML anchors."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    made = {re.sub(r"[^\w\- ]", "", line).strip().lower().replace(" ", "-") for line in headings}
    return made | set(re.findall(r'<a id="([^"]+)">', text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_mentioned_on_pages_exist(page: Path) -> None:
    """Paths start at the root. Pages for contributors also use paths from a source folder."""
    whole = r"`((?:aiordma|native|softdev|tests|docs|examples|bench|integrations)/[\w./]+)`"
    for name in re.findall(whole, page.read_text()):
        assert (ROOT / name).exists(), f"{page.name} names {name}"
    if page.stem in ("design", "how-to-add", "messages"):
        folders = [
            ROOT / folder for folder in ("", "aiordma", "native", "softdev", "softdev/src", "docs")
        ]
        for name in re.findall(r"`([\w./]+)`", page.read_text()):
            if "/" in name or name.endswith((".py", ".pyx", ".c", ".h", ".md")):
                known = any((folder / name).exists() for folder in folders)
                assert known or any(PACKAGE.rglob(name)), f"{page.name} names {name}"


def test_methods_on_the_messages_page_exist() -> None:
    """The page's table lists the methods that a message passes through."""
    page = (DOCS / "messages.md").read_text()
    files = [*(PACKAGE / "_datapath").glob("*.pyx"), *(PACKAGE / "_transport").glob("*.py")]
    source = "\n".join(path.read_text() for path in files)
    ways = page.partition("| what happens |")[2].partition("\n\n")[0]
    for method in re.findall(r"`(?:\w+\.)?(?!pyx?`)(\w+)`", ways):  # except names of files
        assert re.search(rf"^ *c?p?def\b.*\b{method}\(", source, re.M), method


def test_timeouts_page_shows_the_defaults() -> None:
    rows = re.findall(
        r"^\| (`\w+_?.*) \| ([\d., ]+) \|", (DOCS / "cancellation.md").read_text(), re.M
    )
    said = {
        name: float(number)
        for names, numbers in rows
        for name, number in zip(re.findall(r"`(\w+)`", names), numbers.split(","), strict=True)
    }
    config = aiordma.Config()
    assert said == {name: getattr(config, name) for name in said}
    assert {name for name in vars(type(config)) if name.endswith("_timeout")} <= {*said}


def test_generated_parts_of_pages_are_up_to_date() -> None:
    assert differing(pages()) == [], "out of date: make docs"


def test_roce_matrix_has_the_same_rows_as_its_script() -> None:
    """The verdicts come from a virtual machine, so this test compares only the rows."""
    across = ROOT / "softdev" / "tests" / "softroce" / "across"
    listed = run(str(across), "--rows", check=True).stdout
    _, rows = across.with_suffix(".txt").read_text().split("\n\n")
    assert without_verdicts(rows) == without_verdicts(listed), "out of date: make roce"


def without_verdicts(table: str) -> list[str]:
    return [line.rsplit("|", 3)[0] for line in table.splitlines()]
