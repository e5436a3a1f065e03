"""Plant mistakes in the library, one at a time, and record which test finds each.

    [SAMPLE=40] python -m tests.mutants [--list | --record] [PART OF A LINE OF THE LIST ...]

Each worker changes, builds and tests its own clone of HEAD in build/mutants, and never the user's
tree. The results are in build/mutants/*.jsonl, so that an interrupted run can continue. The list is
always the same for the same ``aiordma``.
"""

from __future__ import annotations

import json
import keyword
import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
import tokenize
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from io import StringIO
from itertools import takewhile
from pathlib import Path
from queue import SimpleQueue
from threading import Timer
from typing import Any, NamedTuple
from zlib import crc32

from tests.session.mutants import MUTANTS
from tests.size import PYTHON, tokens

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build/mutants"
RECORD = Path(__file__).with_suffix(".json")
SEED = 1  # other seeds choose other mutants

# Test groups, as pytest arguments.
SESSION = "tests/session"
DATAPATH = "tests/datapath tests/memory tests/event_loop tests/test_mr_pool.py"
CORE = "tests/core tests/trace tests/model tests/test_decoders.py"
TRANSPORT = "tests/transport --ignore=tests/transport/test_rails.py"
SLOW = "tests/transport/test_rails.py tests/simulation"
STREAMS = "tests/test_stream_loop.py tests/transport/test_streams{,_as_tcp,_tls}.py"
CM = "tests/cm tests/test_async_connection_id.py tests/test_async_queue_pair.py"
FACES = "tests/test_{blocking,events,metrics,monitoring,testing,trace,config,errors,options}.py"
DEVICE = "tests/native tests/verbs tests/test_several_devices.py"
AROUND = "tests/cli tests/perf tests/test_pytest_plugin.py"

# The parts of the library: a pattern (the first match wins), the number of mutants, and the test
# groups, fastest first. A group runs only if the earlier groups have not found the mutant.
PARTS = {
    "_datapath": ("_datapath/", 100, (SESSION, DATAPATH, TRANSPORT, SLOW)),
    "_transport": ("_transport/", 80, (SESSION, DATAPATH, TRANSPORT, FACES, SLOW)),
    "streams": ("streams/", 40, (STREAMS, TRANSPORT)),
    "cm": ("cm/|async_connection", 25, (CM, DEVICE, TRANSPORT)),
    "memory": ("_memory/|mr_pool|dmabuf", 30, (DATAPATH, DEVICE, TRANSPORT)),
    "_core, _trace": ("_(core|trace)/", 30, (CORE, SESSION, DEVICE, TRANSPORT, AROUND)),
    "verbs": ("verbs/|async_queue", 40, (DEVICE, CM, TRANSPORT)),
    "_event_loop, _native": (
        "_(event_loop|native)/",
        30,
        (SESSION, DATAPATH, DEVICE, CM, TRANSPORT),
    ),
    "cli, perf": ("cli/|perf/", 20, (AROUND, FACES)),
    "_simulation": ("_simulation/", 10, ("tests/simulation", FACES)),
    "rpc, arrays and others": ("", 40, (FACES, TRANSPORT, AROUND)),
    "by hand": ("$", 0, (SESSION, DATAPATH, TRANSPORT, SLOW)),
}
INVALID = "does not build"

# --- mistakes --------------------------------------------------------------------------------

OTHER = {
    "and": ("and/or", "or"),
    "or": ("and/or", "and"),
    "==": ("condition", "!="),
    "!=": ("condition", "=="),
    "<": ("off by one", "<="),
    "<=": ("off by one", "<"),
    ">": ("off by one", ">="),
    ">=": ("off by one", ">"),
}
SCOPE = re.compile(r"(?:(?:async )?def|(?:cdef )?class|cp?def [^=]*?) ?(\w+)\s*[(:]")
CLASS = re.compile(r"(?:cdef )?class\b")
C_NUMBER = re.compile(r"cp?def (?:inline )?(?:\w*int\w*|size_t|double) ")  # return type
# Matches declarations, and statements whose mutants need not be found by any test.
SKIPPED = re.compile(
    r"(?:@|cdef [^=]*$|(?:raise|assert|import|from|cimport|global|nonlocal|ctypedef)\b)"
    r"|.*\b(?:TYPE_CHECKING|logger\.|warnings\.|add_note\()"
)
SHOWN = {"__repr__", "__str__", "__del__", "text", "describe"}
# Do not swap the first two arguments after these words. They are keywords, or functions that ignore
# the order or fail if it is wrong.
EITHER_WAY = {"max", "min", "isinstance", "issubclass", "gcd", *keyword.kwlist}


@dataclass(frozen=True)
class Mutant:
    path: str  # relative to aiordma/
    line: int
    function: str
    kind: str
    start: int
    end: int
    before: str
    after: str

    def __str__(self) -> str:
        before, after = (" ".join(text.split()) for text in (self.before, self.after))
        return f"{self.path}:{self.line} {self.function}: {self.kind}: {before} -> {after}"

    def rank(self) -> int:
        """Return a pseudorandom rank that stays the same when other code changes."""
        words = f"{SEED} {self.path} {self.function} {self.kind} {self.before} {self.after}"
        return crc32(words.encode())

    def plant(self, source: str) -> str:
        return source[: self.start] + self.after + source[self.end :]


class Token(NamedTuple):
    text: str
    kind: str
    start: int
    end: int
    depth: int  # bracket depth


class Scope(NamedTuple):
    column: int
    row: int
    name: str
    header: str


def statements(source: str) -> Iterator[tuple[int, int, list[Token]]]:
    """Yield the row, column and tokens of each logical line, without tokens inside f-strings."""
    starts = [0]
    for text in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(text))
    line: list[Token] = []
    row = column = depth = inside = 0
    for token in tokenize.generate_tokens(StringIO(source).readline):
        kind = tokenize.tok_name[token.type]
        inside += kind.endswith("STRING_START") - kind.endswith("STRING_END")
        if kind == "NEWLINE":
            yield row, column, line
            line, depth = [], 0
        elif kind not in {"NL", "COMMENT", "INDENT", "DEDENT", "ENDMARKER"} and not inside:
            if not line:
                row, column = token.start
            depth -= token.string in {")", "]", "}"}
            start, end = (starts[at[0] - 1] + at[1] for at in (token.start, token.end))
            line.append(Token(token.string, kind, start, end, depth))
            depth += token.string in {"(", "[", "{"}


def scoped(source: str) -> Iterator[tuple[int, int, list[Token], list[Scope]]]:
    """Yield the statements in functions and classes with their enclosing scopes."""
    scopes: list[Scope] = []
    for row, column, line in statements(source):
        while scopes and scopes[-1].column >= column:
            scopes.pop()
        text = source[line[0].start : line[-1].end]
        if text[-1] == ":" and (found := SCOPE.match(text)):
            scopes.append(Scope(column, row, found[1], text))
        elif scopes:
            yield row, column, line, scopes


def mutants_of(path: str, source: str) -> Iterator[Mutant]:
    """Yield all possible mutants of a file."""
    for row, _, line, scopes in scoped(source):
        names, header = [it.name for it in scopes], scopes[-1].header
        text = source[line[0].start : line[-1].end]
        if not (CLASS.match(header) or SHOWN & {*names} or SKIPPED.match(text)):
            for kind, start, end, after in changes(source, line, bool(C_NUMBER.match(header))):
                yield Mutant(path, row, ".".join(names), kind, start, end, source[start:end], after)


def marked(path: str, source: str) -> str:
    """Instrument Python so that its functions report to REACHED when they run."""
    rows, last = set(), 0
    parts = []
    for _, column, line, scopes in scoped(source):
        scope = scopes[-1]
        if not (CLASS.match(scope.header) or scope.row in rows or line[-1].kind == "STRING"):
            rows.add(scope.row)
            name = f"{path} {'.'.join(it.name for it in scopes)}"
            parts += [source[last : line[0].start], f"__import__('reached').note({name!r})\n"]
            parts.append(" " * column)
            last = line[0].start
    return "".join([*parts, source[last:]])


def changes(source: str, line: list[Token], number: bool) -> Iterator[tuple[str, int, int, str]]:
    """Yield the mutations of a statement. `number` means that its function returns a C number."""
    words = {token.text for token in line}
    first, last = line[0], line[-1]
    if number and words == {"return", "0"}:
        return  # 0 reports success
    turned = first.text in {"if", "elif", "while"}
    if turned and (colon := next((it for it in line if it.text == ":" and not it.depth), None)):
        condition = source[first.end : colon.start].strip()
        yield "condition", first.end, colon.start, f" not ({condition})"
    flat = {token.text for token in line if not token.depth and token.kind == "OP"}
    named = not keyword.iskeyword(first.text) or first.text == "await"
    if named and (flat & {"+=", "-=", "|=", "&="} or (last.text == ")" and flat <= {*".()[]"})):
        yield "left out", first.start, last.end, "pass"
    if first.text == "return" and words - {"return", "None", "False", "0"}:
        value = source[first.end : last.end].strip()
        empty = "0" if number else f"(({value}), None)[1]"
        yield "returns nothing", first.start, last.end, f"return {empty}"
    alone = turned and not {"and", "or"} & words
    for before, token in zip([first, *line], line, strict=False):
        kind, other = OTHER.get(token.text, ("", ""))
        spaced = source[token.start - 1] == source[token.end] == " "  # not a Cython <cast>
        if other and spaced and not (alone and kind == "condition"):
            yield kind, token.start, token.end, other
        elif token.kind == "NUMBER" and re.fullmatch(r"\d+|0x[\da-fA-F]+", token.text):
            yield "off by one", token.start, token.end, str(int(token.text, 0) + 1)
        elif token.text == "(" and before.kind == "NAME" and before.text not in EITHER_WAY:
            yield from swapped(source, line[line.index(token) :])


def swapped(source: str, line: list[Token]) -> Iterator[tuple[str, int, int, str]]:
    """Yield a swap of a call's first two arguments if both are positional. `line` starts at "("."""
    inside = [*takewhile(lambda it: it.depth > line[0].depth, line[1:])]
    flat = [it for it in inside if it.depth == line[0].depth + 1]
    ends = [*(it for it in flat if it.text == ","), line[len(inside) + 1]][:2]
    named = {it.text for it in flat if it.start < ends[-1].start} & {
        "=",
        "*",
        "**",
        "for",
        "lambda",
    }
    if len(ends) == 2 and not named:
        one = source[line[0].end : ends[0].start].strip()
        two = source[ends[0].end : ends[1].start].strip()
        if two and one != two:
            yield "swapped", line[0].end, ends[1].start, f"{two}, {one}"


def git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def tracked(*ends: str) -> list[str]:
    return [it for it in git("ls-files", "aiordma").split() if it.endswith(ends)]


def planted() -> dict[str, tuple[str, Mutant]]:
    """Return the chosen mutants by name, in an order in which any prefix is a fair sample."""
    sources = {
        name.removeprefix("aiordma/"): git("show", f"HEAD:{name}")
        for name in tracked(".py", ".pyx")
    }
    found: dict[str, list[Mutant]] = {part: [] for part in PARTS}
    for path, source in sources.items():
        part = next(part for part, (pattern, *_) in PARTS.items() if re.match(pattern, path))
        found[part] += mutants_of(path, source)
    chosen: list[tuple[float, str, Mutant]] = []
    for part, (_, most, _) in PARTS.items():
        turns: Counter[tuple[str, str]] = Counter()  # mutants chosen per function
        ranked = []
        for mutant in sorted(found[part], key=Mutant.rank):
            turns[mutant.path, mutant.function] += 1
            ranked.append((turns[mutant.path, mutant.function], mutant))
        ranked.sort(key=lambda it: it[0])
        chosen += [(at / most, part, mutant) for at, (_, mutant) in enumerate(ranked[:most])]
    for at, (name, (path, before, after)) in enumerate(MUTANTS.items()):
        start = sources[path].index(before)
        row = sources[path].count("\n", 0, start) + 1
        mutant = Mutant(path, row, name, "by hand", start, start + len(before), before, after)
        chosen.append((at / len(MUTANTS), "by hand", mutant))
    return {str(it): (part, it) for _, part, it in sorted(chosen, key=lambda it: it[0])}


# --- tests -----------------------------------------------------------------------------------

NO_TESTS = 5  # pytest's exit status
PYTEST = "-x -q -p no:cacheprovider --timeout=40 -o faulthandler_timeout=60"
# Match the name of a failed test, or of the test that ran when the process died.
FAILS = (
    re.compile(r"(?:failed in \w+: |ERROR )(.*?)(?:: | - |$)"),
    re.compile(r' *File "\S*?/(tests/\S+\.py)", line \d+ in (test_\w+)'),
)
# A module that records which tests reach a function, in child processes too.
REACHED = """
import contextlib, os
seen = set()

def note(name):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[0]
    if (name, test) not in seen:
        seen.add((name, test))
        with contextlib.suppress(OSError), open(__file__ + ".log", "a") as file:
            file.write(f"{test} {name}\\n")
"""


class Copy:
    """A clone of HEAD with its own build, in which mutants are planted."""

    def __init__(self, number: int) -> None:
        self.path = BUILD / str(number)
        programs = self.path / ".venv/bin"
        self.own = Path(sysconfig.get_path("purelib", vars={"base": f"{self.path}/.venv"}))
        path = f"{programs}:{ROOT / '.venv/bin'}:{os.environ['PATH']}"
        self.environment = os.environ | {"PATH": path}
        if not (self.path / ".git").exists():
            git("clone", "--quiet", ".", str(self.path))
        own = ("git", "--git-dir=.git", "--work-tree=.")  # never a repository in a parent directory
        self.call(*own, "fetch", "--quiet", str(ROOT), "HEAD")
        self.call(*own, "reset", "--quiet", "--hard", "FETCH_HEAD")
        if not (programs / "aiordma").exists():
            self.call(sys.executable, "-m", "venv", "--without-pip", ".venv")
            (self.own / "packages.pth").write_text(sysconfig.get_path("purelib"))
            self.call(
                *(sys.executable, "-m", "pip", "--python", str(programs / "python"), "install"),
                *("--quiet", "--no-build-isolation", "--no-deps", "--editable", "."),
                "--config-settings=build-dir=build/plain",
                "--config-settings=setup-args=-Doptimization=0",
            )
        (self.own / "reached.py").write_text(REACHED)
        self.call("ninja", "-C", "build/plain", "--quiet")

    def call(self, *command: str) -> None:
        quiet = subprocess.DEVNULL
        subprocess.run(command, cwd=self.path, env=self.environment, stdout=quiet, check=True)

    def tests(self, group: str, without: list[str], limit: float) -> str:
        """Run tests until one fails. Return its name, "hang or crash", or "" if all pass."""
        left_out = [f"--deselect={it}" for it in without]
        with subprocess.Popen(
            ["bash", "-c", f'exec python -u -m pytest {PYTEST} "$@" {group}', "", *left_out],
            cwd=self.path, env=self.environment, start_new_session=True, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace",
        ) as process:  # fmt: skip
            assert process.stdout
            kill = partial(os.killpg, process.pid, signal.SIGKILL)
            timer = Timer(limit, kill)
            timer.start()
            try:
                for line in process.stdout:
                    for pattern in FAILS:
                        if found := pattern.match(line):
                            return "::".join(found.groups())
            finally:
                timer.cancel()
                with suppress(ProcessLookupError):
                    kill()
        return "hang or crash" if process.returncode not in (0, NO_TESTS) else ""

    def failing(self, group: str, without: list[str], limit: float = 1200) -> Iterator[str]:
        """Yield each failing test, add it to `without`, and rerun the group without it."""
        while found := self.tests(group, without, limit):
            yield found
            assert "::" in found, f"{group}: {found}"
            without.append(found)

    def measure(self, group: str) -> dict[str, Any]:
        """Run a group without mutants. Return the failures, and the test files by function."""
        log = self.own / "reached.py.log"
        log.write_text("")
        sources = {name: (self.path / name).read_text() for name in tracked(".py")}
        try:
            for name, source in sources.items():
                (self.path / name).write_text(marked(name.removeprefix("aiordma/"), source))
            without = [*self.failing(group, [])]
        finally:
            for name, source in sources.items():
                (self.path / name).write_text(source)
        files: dict[str, list[str]] = {}
        for line in log.read_text().splitlines():
            test, _, function = line.partition(" ")
            test = re.sub("/rails/.*", "/test_rails.py", test)  # runs the tests in rails/
            tests = files.setdefault(function, [])
            tests += [] if test in tests else [test]
        without = [it for it in without if self.tests(f"'{it}'", [], 600)]  # fail uninstrumented
        return {"without": without, "files": files}

    def judge(self, mutant: Mutant, groups: dict[str, dict[str, Any]]) -> tuple[str, str]:
        """Return the test that finds the mutant, and its group. Both are empty if there is none."""
        path = self.path / "aiordma" / mutant.path
        source = path.read_text()
        try:
            path.write_text(mutant.plant(source))
            try:
                self.call("ninja", "-C", "build/plain", "--quiet")
            except subprocess.CalledProcessError:
                return INVALID, ""
            for group, row in groups.items():
                limit = 3 * row["seconds"] + 60
                files = row["files"].get(f"{mutant.path} {mutant.function}", [])
                if mutant.path.endswith(".pyx") or mutant.kind == "by hand" or "" in files:
                    files = [group]  # unknown, or reached by an import outside tests
                if not files:
                    continue
                for found in self.failing(" ".join(files), [*row["without"]], limit):
                    if "::" not in found or self.tests(f"'{found}'", [], 20):
                        return found, group  # also fails alone, so not by chance
        finally:
            path.write_text(source)
        return "", ""


def main(arguments: list[str]) -> None:
    options = {it for it in arguments if it.startswith("--")}
    words = {*arguments} - options or {""}
    first = [*planted().items()][: int(os.environ.get("SAMPLE", "9999"))]
    wanted = {
        name: (part, mutant)
        for name, (part, mutant) in first
        if any(word in f"{part}: {name}" for word in words)
    }
    if "--list" in options:
        print(*(f"{part}: {name}" for name, (part, _) in wanted.items()), sep="\n")
        return
    BUILD.mkdir(parents=True, exist_ok=True)
    log = BUILD / f"{git('rev-parse', 'HEAD:aiordma')[:12]}.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    known = {row["name"]: row for row in rows}
    workers = os.cpu_count() or 1
    free: SimpleQueue[Copy] = SimpleQueue()
    for number in range(workers):
        free.put(Copy(number))

    def work(name: str, part: str, mutant: Mutant | None) -> None:
        """Add the log row of a mutant, or of a test group without mutants."""
        copy = free.get()
        start = time.monotonic()
        try:
            if mutant is None:
                row = copy.measure(name)
            else:
                found, group = copy.judge(mutant, {it: known[it] for it in PARTS[part][2]})
                row = {"part": part if found != INVALID else "", "found": found, "group": group}
                print(f"{name}: {found or 'NOT FOUND'}", flush=True)
            known[name] = {"name": name, "seconds": time.monotonic() - start, **row}
            with log.open("a") as file:
                file.write(json.dumps(known[name]) + "\n")
        finally:
            free.put(copy)

    groups = {group: ("", None) for part, _ in wanted.values() for group in PARTS[part][2]}
    for jobs in groups, wanted:
        with ThreadPoolExecutor(workers) as pool:
            try:
                for job in [pool.submit(work, it, *jobs[it]) for it in jobs if it not in known]:
                    job.result()
            finally:
                pool.shutdown(cancel_futures=True)
    judged = [row for row in known.values() if "part" in row]
    report(judged)
    ran = {it for row in known.values() for files in row.get("files", {}).values() for it in files}
    ran -= {"", *(row["found"].partition("::")[0] for row in judged)}
    paths = {it: ROOT / it for it in ran if (ROOT / it).exists()}  # not those that tests create
    for size, file in sorted((tokens(path.read_text(), PYTHON), it) for it, path in paths.items()):
        print(f"{size:6} tokens of {file} found nothing before others")
    if "--record" in options:
        RECORD.write_text(json.dumps(counts(judged)) + "\n")
    if any(row["part"] == "by hand" and not row["found"] for row in judged):
        sys.exit("a mistake by hand was not found: the seeds of the pair found it before")


def report(rows: list[dict[str, Any]]) -> None:
    """Print the number of mutants found by each test file, and the names of those not found."""
    print(table(counts(rows)))
    files = Counter((row["group"], row["found"].partition("::")[0]) for row in rows if row["found"])
    for (group, file), times in sorted(files.items()):
        print(f"{times:4} found by {file} in: {group}")
    print(*(f"not found: {row['name']}" for row in rows if not row["found"]), sep="\n")


def counts(rows: list[dict[str, Any]]) -> dict[str, list[int]]:
    """Count the mutants of each part: planted, found, and found by the first group."""
    found: dict[str, list[int]] = {}
    for part, (_, _, groups) in PARTS.items():
        groups_of = [row["group"] for row in rows if row["part"] == part]
        if groups_of:
            found[part] = [len(groups_of), sum(map(bool, groups_of)), groups_of.count(groups[0])]
    return found


def table(found: dict[str, list[int]]) -> str:
    """Format the share of mutants found as a table for a page."""
    total = [sum(column) for column in zip(*found.values(), strict=True)]
    lines = ["| part | planted | found | by the first tests |", "|---|---|---|---|"]
    for part, (all_, tests, first) in [*found.items(), ("all", total)]:
        lines.append(f"| {part} | {all_} | {100 * tests // all_} % | {100 * first // all_} % |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main(sys.argv[1:])
