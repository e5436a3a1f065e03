"""The comparisons of bench/, and the page of results."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench import __main__ as command
from bench import instructions, plots
from bench.__main__ import COMPARISONS
from bench.lanes import Lane, Options, at_least, at_most, ratio, spread, take_turns
from bench.results import Results, markdown

ROOT = Path(__file__).parents[1]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "bench", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


# ---- measuring -----------------------------------------------------------------------------------


def test_turns() -> None:
    """Each lane once to warm up, then in every turn; what is not installed has no figures."""
    done: list[str] = []

    def lane(who: str) -> Lane:
        def do() -> float:
            done.append(who)
            return len(done)

        return Lane("work", who, do)

    lanes = [lane("a"), lane("b"), Lane.missing("work", "c")]
    data = take_turns(lanes, Options(turns=2))
    assert done == ["a", "b"] * 3
    assert [entry["seconds"] for entry in data] == [[3, 5], [4, 6], []]
    for judge in (at_least, at_most):
        found = judge("speed", 1, ratio(data[0]["seconds"], data[2]["seconds"]))
        assert (found.measured, found.reached) == ("not measured", None)


def state(pid: str) -> str:
    """As of proc_pid_stat(5); a process that has gone is a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"


def until_all_are(expected: str, pids: list[str]) -> None:
    until = time.monotonic() + 10
    while {*map(state, pids)} != {expected} and time.monotonic() < until:
        time.sleep(0.01)  # a signal takes its time
    assert {*map(state, pids)} == {expected}


def test_what_polls_for_ever_is_stopped_between_its_turns(tmp_path: Path) -> None:
    """And ends with what started it.  A Python by another name is that of another environment."""
    program = (
        "import os, sys; from bench.contender import InPython, two_cores;"
        "folder, name = os.path.split(sys.executable);"
        "one = InPython('TCP protocol', 'asyncio', two_cores(), os.path.join(folder, '.', name));"
        "[one.do('echo', size=64, count=1) for _ in range(2)];"
        "print(*open(f'/proc/self/task/{os.getpid()}/children').read().split(), flush=True);"
        "input(); os._exit(0)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},  # it leaves a folder
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        pids = process.stdout.readline().split()
        assert len(pids) == 2
        until_all_are("T", pids)
        process.communicate("\n")
    until_all_are("Z", pids)


@pytest.mark.parametrize(("share", "count"), [(1, 640), (0.1, 64), (0.001, 64)])
def test_how_much_is_measured(share: float, count: int) -> None:
    assert Options(share=share).count(640, 64) == count


# ---- what is made of it --------------------------------------------------------------------------


def test_ratios_are_made_turn_by_turn() -> None:
    found = ratio([10, 40, 60], [5, 10, 20])
    assert found.values == (2, 4, 3)
    assert f"{found:.1f}" == "3.0 (2.0-4.0)"


@pytest.mark.parametrize(
    ("judge", "reached"), [(at_least, (True, True, False)), (at_most, (False, True, True))]
)
def test_what_is_reached(judge: type, reached: tuple[bool, ...]) -> None:
    for limit, expected in zip((1, 2, 3), reached, strict=True):
        requirement = judge("speed", limit, spread([1, 2, 9]))
        assert requirement.reached is expected
        assert requirement.measured == "2.00 (1.00-9.00) x"


ADAPTIVE = "64 B echo round trip, adaptive polling: times faster than uvloop TCP protocols"


def made_up() -> Results:
    seconds = {"aiordma": [1e-5, 2e-5, 3e-5], "uvloop TCP protocol": [4e-5, 6e-5, 9e-5]}
    who = [*seconds, "aiordma, sleeping", "uvloop Unix protocol"]
    return {
        "machine": {"kernel": "one"},
        "turns": 3,
        "data": {
            "latency": [
                {"work": "64 B", "who": name, "seconds": seconds.get(name, [1e-5] * 3)}
                for name in who
            ]
        },
    }


def test_results_say_what_was_measured() -> None:
    text = markdown(
        made_up(), COMPARISONS, {"latency": "plots/latency.svg"}, {ADAPTIVE: "It is so."}
    )
    assert "a median of 3 turns" in text
    assert "| kernel | one |" in text
    adaptive, sleeping, unix = re.findall(r"^\| 64 B echo.* x \|(.*)\|$", text, re.M)
    assert adaptive == " at least 5 x | 3.00 (3.00-4.00) x | **not reached** "[-len(adaptive) :]
    assert sleeping.endswith("reached ")
    assert "**" not in unix
    assert "\n| aiordma | 20 (10-30) |\n" in text
    assert "\n| uvloop TCP protocol | 60 (40-90); 3.00 (3.00-4.00) |\n" in text
    assert "![Echo](plots/latency.svg)" in text
    assert f"\n**{ADAPTIVE}**: It is so.\n" in text
    assert text.count("\n**") == 1
    assert "The programs: one task that awaits `send`, then `recv`" in text
    in_short = "| 64 B echo | 20 us | uvloop TCP protocol: 60 us | 3.00 (3.00-4.00) |"
    assert re.findall(r"^\| \d.* echo.*", text, re.M)[0] == in_short
    titles = re.findall("^## (.*)", text, re.M)
    assert titles == ["In short", "Echo", "The machine", "Goals"]
    text = markdown(made_up(), COMPARISONS, {}, {})
    assert f"\n**{ADAPTIVE}**: not investigated.\n" in text


COMMITTED = command.HERE / command.SAVED


def test_the_committed_results_are_those_of_the_command() -> None:
    """Generated pages are unedited; a row that misses its goal has a note, and no other one has."""
    results = json.loads(COMMITTED.read_text())
    text = (command.HERE / "RESULTS.md").read_text()
    assert text == command.text(results)
    assert "not investigated" not in text
    asked = {
        requirement.what
        for name, data in results["data"].items()
        for requirement in COMPARISONS[name].requirements(data)
    }
    assert command.NOTES.keys() <= asked


def test_results_are_rendered_from_what_was_saved(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(json.dumps(made_up()))
    names = ("RESULTS.md", "plots/latency.svg", "plots/summary.svg")
    files = [tmp_path / name for name in names]
    written = []
    for _ in range(2):
        done = bench("render", "--folder", str(tmp_path))
        assert done.stderr == ""
        assert done.returncode == 0
        written.append([file.read_text() for file in files])
    assert written[0] == written[1]
    assert all("uvloop TCP protocol" in text for text in written[0])


@pytest.mark.parametrize(
    ("values", "logarithmic", "marks"),
    [
        ((3, 7.5), False, [0, 2, 4, 6, 8]),
        ((1, 12), False, [0, 5, 10, 15]),
        ((1.9, 160), True, [1, 10, 100, 200]),
        ((0.07, 3), True, [0.05, 0.1, 1, 5]),
    ],
)
def test_the_axis_fits(values: tuple[float, ...], logarithmic: bool, marks: list[float]) -> None:
    """All is between the first and the last tick."""
    found, at = plots.ticks(values)
    assert found is logarithmic
    assert at == pytest.approx(marks)


def test_a_picture_has_its_figures(tmp_path: Path) -> None:
    """A bar's length is its median's part of the axis; names are as text, as XML has it."""
    rows = [("aiordma", spread([20, 40, 60])), ("<other>", spread([80]))]
    plots.draw([plots.Panel("work", "us", rows)], tmp_path / "plots" / "one.svg")
    text = (tmp_path / "plots" / "one.svg").read_text()
    texts = [it.text for it in ElementTree.fromstring(text).iter() if it.tag.endswith("text")]
    assert [*texts[:2], *texts[-4:]] == [
        "work",
        "us, less is better",
        "aiordma",
        "40",
        "<other>",
        "80",
    ]
    ours, other = map(float, re.findall(r'<rect .* width="([\d.]+)"', text))
    assert other / ours == pytest.approx(2, rel=0.01)


def test_one_comparison_is_printed() -> None:
    done = bench("imports", "--quick")
    assert done.returncode == 0
    assert done.stderr == "measuring: Import\n"
    assert "| import aiordma | " in done.stdout
    assert "| kernel | " in done.stdout


# The address sanitizer's allocator takes as much again and more: there a connection takes too much.
SANITIZED = "ASAN_OPTIONS" in os.environ
OWN = (64 << 10) * (4 if SANITIZED else 1)
REACHED = 4 if SANITIZED else 5


def test_cost(tmp_path: Path) -> None:
    """The costs are within their limits."""
    file = tmp_path / "cost.json"
    sizes = ("--count", "60", "--mib", "64", "--seconds", "0.5")
    done = bench("cost", *sizes, "--json", str(file))
    assert done.stderr == ""
    assert done.returncode == 0
    assert done.stdout.count(" yes ") == REACHED
    assert "60 idle connections" in done.stdout
    data = json.loads(file.read_text())
    connections = data["connections"]
    assert all(0 < own <= OWN for own in connections["own"])
    # Only receives that have been used are in memory.
    assert all(pool < 16 << 10 for pool in connections["pool"])
    # No contender has run yet: a failure would repeat.
    assert connections["idle_runs"] == [0, 0]
    assert connections["files"] == [0, 0]
    assert all(ns > 0 for ns in data["keep_alive"]["ns_per_probe"])
    assert len(data["transfers"]["extra"]) == 3
    for extra in data["transfers"]["extra"].values():
        assert max(extra) < 8 << 20
    text = markdown({**made_up(), "cost": data}, COMPARISONS, {}, {})
    assert text.count("| reached |") >= REACHED
    assert "| 60 idle connections in a process, in all |" in text


# ---- instructions --------------------------------------------------------------------------------

RECORDED = {instructions.CALIBRATION: 1000.0, "an echo": 50_000.0}


@pytest.mark.parametrize(
    ("counts", "where", "said", "good"),
    [
        ((1000, 52_000), "here", "+4.0%  an echo\n", True),
        ((1000, 53_000), "here", "+6.0%  an echo  MORE than it may be\n", False),
        ((1000, 40_000), "here", "-20.0%  an echo  less: record it", True),
        # Another Python is measured by what asyncio takes there.
        ((2000, 120_000), "elsewhere", "compared with here, 2.00 times as much", True),
        ((2000, 130_000), "elsewhere", "Nothing is recorded for elsewhere", False),
        ((1000, 50_000, 7), "here", "another: not recorded", False),
    ],
)
def test_more_instructions_are_noticed(
    counts: tuple[float, ...], where: str, said: str, good: bool
) -> None:
    names = (*RECORDED, "another")
    lines, found = instructions.compare(
        dict(zip(names, counts, strict=False)), {"here": RECORDED}, where
    )
    assert said in "\n".join(lines)
    assert found is good


def test_counts_are_those_of_the_work(tmp_path: Path) -> None:
    dump = tmp_path / "out.1-01"
    dump.write_text("version: 1\ndesc: Trigger: Client Request: 10 x an echo\n\ntotals: 5000\n")
    assert instructions.of_file(dump) == ("an echo", 500)
    dump.write_text("version: 1\ndesc: Trigger: Program termination\n\ntotals: 5000\n")
    assert instructions.of_file(dump) is None


def test_every_record_has_all_works() -> None:
    records = json.loads(instructions.RECORDS.read_text())
    first, *others = ({*record} for record in records.values())
    assert instructions.CALIBRATION in first
    assert all(other == first for other in others)
