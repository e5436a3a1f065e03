"""Tests of which module may import which, and of the effects of importing.

Dependencies between groups point one way, from the outer layers to the pure core.
``docs/design.md`` describes each group. A new module or package needs a row here before anything
can be imported into it.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.processes import run_python

PACKAGE = Path(__file__).parents[1] / "aiordma"

CORE = {"_core", "errors"}
PUBLIC = {
    "dmabuf", "async_connection_id", "async_queue_pair", "cm", "events", "config", "errors",
    "mr_pool", "trace", "transport", "verbs",
}  # fmt: skip

# Maps each group or module to the others that it may import. If one module of a group has its own
# row, all modules of the group need one.
GROUPS: dict[str, set[str]] = {
    "errors": set(),
    "_core": {"errors"},
    "config": {"_core.region", "_core.arguments", "_core.timers"},
    "_native": {"errors", "_core.arguments"},
    "verbs": {"_native", "_core.lazy_exports", "_core.qp_states", "_core.handshake_layout"}
    | {"_core.environment"}
    | {"_core.arguments", "_core.timers", "errors"},
    "cm": {"_native", "verbs"} | CORE,
    "_memory.pool_waiters": {"errors", "_datapath", "_event_loop.futures"},
    "_memory.stalled_reads": {"_datapath"},
    "_datapath": {"verbs", "_native"} | CORE,
    "mr_pool": {"verbs", "_native", "_datapath", "_memory.pool_waiters", "_memory.stalled_reads"}
    | CORE,
    "_memory.registration_cache": {"_core.finalizers", "verbs", "_native", "_datapath", "mr_pool"},
    "_memory.block_source": {"mr_pool"},
    "_memory": set(),
    "dmabuf": {"verbs", "mr_pool"} | CORE,
    "_trace": {"_core.arguments", "_core.strict_json", "errors"},
    "trace": {"_native", "_trace"} | CORE,
    "_event_loop.adaptive_polling": set(),
    "_event_loop.affinity": {"_native", "errors"},
    "_event_loop.coarse_timers": {"_native", "_datapath"},
    "_event_loop.completion_reader": {"_datapath", "_event_loop.adaptive_polling", "verbs"},
    "_event_loop.device_failures": {"_native"},
    "_event_loop.driver": {
        "config",
        "verbs",
        "cm",
        "_native",
        "mr_pool",
        "_memory.registration_cache",
        "_datapath",
    }
    | {"_event_loop.coarse_timers", "_event_loop.completion_reader"}
    | {
        "_event_loop.device_failures",
        "_event_loop.loop_settings",
        "_event_loop.per_loop_resource",
        "_event_loop.shutdown",
        "_event_loop.time_share",
    }
    | CORE,
    "_event_loop.futures": set(),
    "_event_loop.id_events": {
        "cm",
        "verbs",
        "errors",
        "_event_loop.driver",
        "_event_loop.shutdown",
    },
    "_event_loop.loop_settings": {"config", "_core.arguments", "_event_loop.per_loop_resource"},
    "_event_loop.per_loop_resource": {"_native"},
    "_event_loop.shutdown": {
        "_core.async_only",
        "_core.finalizers",
        "_native",
        "_event_loop.affinity",
    }
    | {"_event_loop.per_loop_resource"},
    "_event_loop.time_share": {"_core.finalizers", "_datapath"},
    "_event_loop.virtual_loop": {"_datapath"},
    "_event_loop.wait_queue": {"_event_loop.futures"},
    "_event_loop": set(),
    "events": {"verbs", "_event_loop", "errors", "_core.async_only"},
    "async_connection_id": {
        "async_queue_pair",
        "cm",
        "verbs",
        "_event_loop",
        "errors",
        "_core.arguments",
        "_core.async_only",
    },
    "async_queue_pair": {
        "cm",
        "verbs",
        "_event_loop",
        "errors",
        "_core.arguments",
        "_core.async_only",
    },
    "_transport": {
        "_event_loop",
        "_memory",
        "_datapath",
        "mr_pool",
        "cm",
        "verbs",
        "_native",
        "config",
    }
    | {"dmabuf"}
    | CORE,
    "_options": {"_transport", "cm", "config"},
    "transport": {"_transport", "_options", "_event_loop", "_datapath", "mr_pool", "cm", "verbs"}
    | {"config"}
    | CORE,
    "reconnecting": PUBLIC | {"_options", "_core.arguments", "_transport.arguments"},
    "arrays": {"transport", "_transport.remote_memory", "verbs"} | CORE,
    "rpc": {"transport", "_options", "_event_loop.shutdown", "_datapath", "mr_pool", "verbs"}
    | CORE,
    "monitoring": PUBLIC | {"_transport", "_event_loop", "_datapath", "_core.snapshot_types"},
    "_private_files": set(),
    "monitoring_socket": {"monitoring", "_native", "_private_files", "verbs"},
    "metrics": {"monitoring"},
    "prometheus": {"metrics", "monitoring"},
    "opentelemetry": {"metrics", "monitoring"},
    "blocking": PUBLIC
    | {"streams", "_native", "_event_loop.shutdown", "_core.arguments", "_transport.listening"}
    | {"_core.finalizers", "_transport.arguments"},
    "streams": PUBLIC
    | {
        "_options",
        "_core.arguments",
        "_core.async_only",
        "_core.lazy_exports",
        "_transport.arguments",
        "_event_loop.affinity",
        "_event_loop.futures",
        "_event_loop.shutdown",
    },
    # The package itself collects the public names, so no module listed above may import it.
    "": PUBLIC
    | {"_core.lazy_exports", "streams", "reconnecting", "monitoring"}
    | {"monitoring_socket"},
    "pytest_plugin": {"", "testing", "verbs"},
    "_simulation": {
        "_core.arguments",
        "_event_loop",
        "_native",
        "_transport",
        "cm",
        "errors",
        "verbs",
    },
    "testing": PUBLIC
    | {
        "",
        "streams",
        "_core.arguments",
        "_core.finalizers",
        "_simulation",
        "_event_loop.virtual_loop",
    },
    "perf": PUBLIC | {"", "streams", "_core.refusal", "_core.strict_json"},
    "cli": PUBLIC
    | {"", "streams", "testing", "perf", "monitoring", "monitoring_socket", "_private_files"}
    | {"_core.environment"},
    "__main__": {"cli"},
}

# Groups built on public names. Maps each to the private attributes of other objects that it uses
# nevertheless, with the reasons.
UNUSED_FAULTS = "the plugin and `aiordma run` report injected faults that never happened"
BUILT_ON_PUBLIC_NAMES: dict[str, dict[str, str]] = {
    "rpc": {},
    "reconnecting": {},
    "perf": {},
    "arrays": {},
    "cli": {"_has_fault": UNUSED_FAULTS, "_never_happened": UNUSED_FAULTS},
    "testing": {
        "_after": "set by `faults` on its own object",
        "_fault_chances": "faults that could have happened",
        "_is_limited_to_process": UNUSED_FAULTS,
        "_never_happened": UNUSED_FAULTS,
    },
    "pytest_plugin": {
        "_end": "the fixture ends its own object",
        "_folder": "traces of the fixture's programs",
        "_has_fault": UNUSED_FAULTS,
        "_is_limited_to_process": UNUSED_FAULTS,
        "_never_happened": UNUSED_FAULTS,
        "_started": "whether the fixture has run a program",
    },
    "blocking": {
        "_affinity": "finds a server that runs in the loop of the caller, who would block it",
        "_deliver": "puts back a connection that an interrupted call could not return",
        "_drop": "returns a region that an interrupted call could not return",
        "_mr": "takes over the registration of a region",
        "_release_memory": "releases it in the loop's thread",
        "_timeout": "set by `within` on a copy of its own object",
    },
    "streams": {
        "_end_without_loop": "a transport's connection may outlive the event loop",
        "_endpoint": "uses the limits of the connection's `Config`",
        "_get_app_transport": "of asyncio's SSLProtocol, as asyncio does",
        "_is_ending": "a socket becomes readable when the peer closes the connection",
        "_messages": "a socket is readable when a message has arrived",
    },
}
NAMED_TUPLE_METHODS = {"_asdict", "_replace"}

PURE = ("errors", "_core", "_trace", "config")
WITHOUT_EVENT_LOOP = (*PURE, "_native", "verbs", "cm")
WITHOUT_CLOCK = (
    "_datapath",
    "_memory",
    "mr_pool",
    "_event_loop",
    "_transport",
)  # they are passed one

# Modules without I/O in groups that have it.
WITHOUT_IO = {PACKAGE / "_transport/handshake.py"}

# Modules that pure code must not import: they give access to the event loop, the clock, I/O or
# other threads.
IMPURE = {
    "_thread", "asyncio", "cffi", "concurrent", "ctypes", "logging", "mmap", "multiprocessing",
    "queue", "random", "secrets", "select", "selectors", "signal", "socket", "ssl", "subprocess",
    "threading", "time",
}  # fmt: skip

# Allowed packages outside the standard library. Type-checking blocks may also import
# typing_extensions.
THIRD_PARTY = {
    "_core": {"msgpack"},
    "_native": {"cffi"},  # for building; the compiled module imports its own backend
    "perf": {"msgpack"},
    "_simulation": {"numpy"},  # seeded if installed
    "arrays": {"numpy"},
    "pytest_plugin": {"pytest"},
    "rpc": {"msgpack"},
    "_transport": {"cryptography"},  # only if encryption is enabled
    "cli": {"click", "matplotlib", "rich"},
    "prometheus": {"prometheus_client"},
    "opentelemetry": {"opentelemetry"},
}


PYTHON = (".py", ".pyi")
CYTHON = (".pyx", ".pxd")

# `ast` cannot parse Cython. `names` is a list in parentheses over several lines, or the rest of one
# line.
CYTHON_IMPORT = re.compile(
    r"^[ \t]*(?:from\s+(?P<module>[.\w]+)\s+c?import\s+(?P<names>\([^)]*\)|[^\n(]+)"
    r"|c?import\s+(?P<modules>[^\n]+))$",
    re.MULTILINE,
)
# Modules that belong to Cython itself, including its directives.
OF_CYTHON = {"cython", "cpython", "libc", "posix"}


@dataclass(frozen=True)
class Import:
    """An imported module, and the place of the import."""

    where: str
    line: int
    module: str
    only_for_types: bool

    def __str__(self) -> str:
        return f"aiordma/{self.where}:{self.line} imports {self.module}"


def group_of(path: Path) -> str:
    """Return the key of the module's row in GROUPS. The key of the package itself is ""."""
    group, *inner = path.relative_to(PACKAGE).with_suffix("").parts
    if group == "_exports":  # lazy imports of the package with this name
        return inner[0].removeprefix("aiordma")
    if inner and inner[0] != "__init__" and any(row.startswith(f"{group}.") for row in GROUPS):
        return f"{group}.{inner[0]}"
    return "" if group == "__init__" else group


@functools.cache
def modules() -> list[Path]:
    """Return all Python and Cython modules, including stubs."""
    return sorted(path for path in PACKAGE.rglob("*.*") if path.suffix in {*PYTHON, *CYTHON})


def is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


@functools.cache
def imports(path: Path) -> tuple[Import, ...]:
    """Return a module's imports and cimports, including those in functions, by full name."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[Import]:
    here = path.relative_to(PACKAGE)
    for line, base, names, only_for_types in statements(path):
        level = len(base) - len(base.lstrip("."))
        package = ("aiordma", *here.parts[:-1])
        outer = package[: len(package) - level + 1] if level else ()
        full = ".".join([*outer, *filter(None, [base.lstrip(".")])])
        for name in names:
            # `from . import x` may import a module instead of a name. In this case x is the
            # imported module.
            module = f"{full}.{name}".removeprefix(".")
            found = module if not base or is_module(module) else full
            yield Import(str(here), line, found, only_for_types or path.suffix == ".pyi")


def tree(path: Path) -> tuple[ast.AST, ...]:
    """Return the nodes of a Python module. Caching them would slow down garbage collection."""
    return tuple(ast.walk(ast.parse(path.read_text(), str(path))))


def statements(path: Path) -> Iterator[tuple[int, str, list[str], bool]]:
    """Yield the line, module and names of each import, and whether it is only for types."""
    source = path.read_text()
    if path.suffix in CYTHON:
        for match in CYTHON_IMPORT.finditer(source):
            names = re.sub(r"#.*", "", match["names"] or match["modules"]).strip("()").split(",")
            found = [name.split()[0] for name in names if name.strip()]
            yield source.count("\n", 0, match.start()) + 1, match["module"] or "", found, False
        return
    nodes = tree(path)
    typed = {
        id(inner)
        for node in nodes
        if isinstance(node, ast.If) and is_type_checking(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            base = ""
            if isinstance(node, ast.ImportFrom):
                base = "." * node.level + (node.module or "")
            yield node.lineno, base, [alias.name for alias in node.names], id(node) in typed


@functools.cache
def attributes(path: Path) -> set[str]:
    """Return the names of all attributes that the module accesses."""
    if path.suffix in CYTHON:
        return set(re.findall(r"\.(\w+)", path.read_text()))
    return {node.attr for node in tree(path) if isinstance(node, ast.Attribute)}


@functools.cache
def is_module(name: str) -> bool:
    parts = name.split(".")
    if parts[0] != "aiordma":
        return False
    path = PACKAGE.joinpath(*parts[1:])
    return path.is_dir() or any(path.with_suffix(suffix).exists() for suffix in (*PYTHON, *CYTHON))


def group_and_module(name: str) -> tuple[str, str]:
    """Split a name: `aiordma._core.frames` becomes `_core` and `_core.frames`."""
    inner = name.removeprefix("aiordma").removeprefix(".")
    parts = inner.split(".")
    return parts[0], ".".join(parts[:2])


def test_package_groups_import_only_allowed_groups() -> None:
    wrong = [found for path in modules() for found in not_allowed(path)]
    assert not wrong, "; ".join(map(str, wrong))


def not_allowed(path: Path) -> Iterable[Import]:
    """Yield the module's imports that the tables do not allow."""
    group = group_of(path)
    assert group in GROUPS, f"{path.name}: say in the table of this test what {group} may import"
    allowed = GROUPS[group]
    for found in imports(path):
        top = found.module.partition(".")[0]
        if top == "aiordma":
            target, module = group_and_module(found.module)
            if target not in (group, "_exports", *allowed) and module not in allowed:
                yield found
        elif path.suffix in CYTHON and top in OF_CYTHON:
            continue
        elif top not in sys.stdlib_module_names:
            typed = found.only_for_types and top == "typing_extensions"
            if top not in THIRD_PARTY.get(group, set()) and not typed:
                yield found


def test_package_groups_do_not_import_banned_modules() -> None:
    wrong = []
    for path in modules():
        group = group_of(path)
        banned = IMPURE if group in PURE else {"asyncio"} if group in WITHOUT_EVENT_LOOP else set()
        if group.partition(".")[0] in WITHOUT_CLOCK and path.stem != "rail_status":  # user output
            banned = {"time", "datetime"}
        if path in WITHOUT_IO:
            banned = IMPURE
        if path.suffix != ".pyi":  # stubs are never executed
            wrong += [it for it in imports(path) if it.module.partition(".")[0] in banned]
    assert not wrong, "; ".join(map(str, wrong))


def test_allowed_group_imports_are_acyclic() -> None:
    """A group includes its modules that have their own rows.

    A module without a row stands for its group.
    """
    graph = {
        group: {name if name in GROUPS else name.partition(".")[0] for name in below}
        | {row for row in GROUPS if group and row.startswith(f"{group}.")}
        for group, below in GROUPS.items()
    }
    TopologicalSorter(graph).prepare()  # CycleError contains a cycle


def test_data_path_cimports_are_acyclic() -> None:
    graph: dict[str, set[str]] = {}
    for path in (PACKAGE / "_datapath").glob("*.p[xy][dx]"):
        found = re.findall(r"^from \.(\w+) cimport", path.read_text(), re.MULTILINE)
        graph.setdefault(path.stem, set()).update(found)
    assert len(graph) > 20
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize(
    ("beginning", "where"),
    [
        ("aiordma._native._lib", "_native/"),
        ("aiordma.verbs.experimental", "verbs/experimental/"),
        ("posix.time", "_datapath/memory.pyx"),  # `Clock`, which is passed to all others
        ("libc.time", "nowhere"),
    ],
)
def test_restricted_modules_are_imported_only_by_their_owners(beginning: str, where: str) -> None:
    found = [it for path in modules() for it in imports(path) if it.module.startswith(beginning)]
    assert [str(it) for it in found if not it.where.startswith(where)] == []


@pytest.mark.parametrize(
    ("names", "where"),
    [
        ({"add_reader", "add_writer"}, "_event_loop/driver.py"),  # watches all file descriptors
        ({"register_at_fork"}, "_native/fork.py"),
    ],
)
def test_reader_and_fork_hooks_are_registered_in_one_module(names: set[str], where: str) -> None:
    places = (path for path in modules() if attributes(path) & names)
    found = [str(path.relative_to(PACKAGE)) for path in places]
    assert [it for it in found if not it.startswith("_simulation/")] == [where]


def private_attributes_of_others(path: Path) -> set[str]:
    """Return the private attributes that a module uses of objects other than `self`."""
    nodes = tree(path)
    own = {"self", "cls", *(node.name for node in nodes if isinstance(node, ast.ClassDef))}
    return {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.endswith("__")
        and node.attr not in NAMED_TUPLE_METHODS
        and not (isinstance(node.value, ast.Name) and node.value.id in own)
    }


@pytest.mark.parametrize("group", BUILT_ON_PUBLIC_NAMES)
def test_outer_modules_use_no_private_attributes_of_other_objects(group: str) -> None:
    paths = [path for path in modules() if path.suffix == ".py" and group_of(path) == group]
    used = set[str]().union(*map(private_attributes_of_others, paths))
    assert paths
    assert used == set(BUILT_ON_PUBLIC_NAMES[group])


def test_only_the_softdev_module_uses_device_symbols() -> None:
    """Only one module uses other symbols of the device."""
    beyond = re.compile(r"aiordma_(?:embedded|sim|trace)_|AIORDMA_SIM_")
    sources = [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.pyx")]
    assert [it.name for it in sources if beyond.search(it.read_text())] == ["softdev.py"]


def run(code: str) -> str:
    """Run a program in a new interpreter with warnings as errors, and return its output."""
    done = run_python("-W", "error", "-c", code)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_pure_groups_do_not_load_asyncio_or_native_code() -> None:
    """``aiordma`` is an empty package in this interpreter, so that nothing else is loaded."""
    names = [
        ".".join(("aiordma", *path.relative_to(PACKAGE).with_suffix("").parts))
        for path in modules()
        if group_of(path) in PURE
    ]
    loaded = run(
        "import importlib, sys, types\n"
        "package = types.ModuleType('aiordma')\n"
        f"package.__path__ = [{str(PACKAGE)!r}]\n"
        "sys.modules['aiordma'] = package\n"
        f"for name in {names!r}: importlib.import_module(name.removesuffix('.__init__'))\n"
        "print(*sys.modules)\n"
    ).split()
    assert "aiordma._core.protocol" in loaded
    assert {"asyncio", "_asyncio", "_cffi_backend", "aiordma._native"}.isdisjoint(loaded)
    groups = {name.split(".")[1] for name in loaded if name.startswith("aiordma.")}
    assert groups <= set(PURE)


def test_importing_aiordma_has_no_side_effects() -> None:
    run(
        """
import logging, os, signal, sys
import asyncio  # its own imports are not what is looked at here

def threads(): return os.listdir("/proc/self/task")
def descriptors(): return sorted(os.listdir("/proc/self/fd"))
def handlers(): return [signal.getsignal(number) for number in sorted(signal.valid_signals())]

before = threads(), descriptors(), handlers(), asyncio.get_event_loop_policy.__module__
import aiordma
assert {name for name in sys.modules if name.startswith("aiordma.")} == {
    "aiordma._core", "aiordma._core.lazy_exports"
}
for name in aiordma.__all__: getattr(aiordma, name)
after = threads(), descriptors(), handlers(), asyncio.get_event_loop_policy.__module__

assert len(threads()) == 1, "a thread was started"
assert after == before, (before, after)
assert logging.root.handlers == [] and logging.root.level == logging.WARNING
for name, logger in logging.root.manager.loggerDict.items():
    if name.partition(".")[0] == "aiordma" and isinstance(logger, logging.Logger):
        assert logger.level == logging.NOTSET and logger.propagate, name
        assert all(isinstance(h, logging.NullHandler) for h in logger.handlers), name
with open("/proc/self/maps") as maps:
    loaded = maps.read()
for library in ("libibverbs", "librdmacm", "libmlx5", "libefa"):
    assert library not in loaded, f"{library} was opened"
import aiordma._event_loop.driver
assert threads() == before[0] and descriptors() == before[1] and aiordma.verbs.live() == {}
"""
    )
