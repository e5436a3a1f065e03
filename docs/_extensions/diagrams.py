"""The `mermaid` directive, which draws state diagrams with Graphviz."""

from __future__ import annotations

import re

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.ext.graphviz import graphviz
from sphinx.util.docutils import SphinxDirective

_STEP = re.compile(r"(\S+) --> ([^\s:]+)(?: ?: (.*))?$")
_GROUP = re.compile(r"state (\w+) \{$")

_STYLE = """digraph {
compound=true; bgcolor="transparent"; rankdir="TB";
node [shape=box, style=rounded, fontname="sans-serif", fontsize=11];
edge [fontname="sans-serif", fontsize=10];
"[*]" [shape=point, width=0.15];
"""


def dot(diagram: str) -> str:
    """Convert a Mermaid state diagram to Graphviz's dot language.

    Raises:
        ValueError: If a line is not recognized.
    """
    first, *lines = map(str.strip, diagram.splitlines())
    if first != "stateDiagram-v2":
        raise ValueError(f"not a state diagram: {first}")
    groups: dict[str, str] = {}  # group -> one of its states
    written = []
    inside = ""
    for line in filter(None, lines):
        if group := _GROUP.match(line):
            inside = group[1]
            written.append(f"subgraph cluster_{inside} {{ style=rounded;")
        elif line == "}":
            inside = ""
            written.append(line)
        elif step := _STEP.match(line):
            if inside:
                groups.setdefault(inside, step[1])
            written.append(_arrow(step[1], step[2], step[3] or "", groups))
        else:
            raise ValueError(f"neither a step nor a group of states: {line}")
    return "\n".join([_STYLE, *written, "}"])


def _arrow(start: str, end: str, label: str, groups: dict[str, str]) -> str:
    """Return an edge in dot. An edge to or from a group is clipped at the group's border."""
    ends = {"ltail": start, "lhead": end}
    cut = [f"{key}=cluster_{name}" for key, name in ends.items() if name in groups]
    options = ", ".join([f'label=" {label} "', *cut])
    return f'"{groups.get(start, start)}" -> "{groups.get(end, end)}" [{options}];'


class Mermaid(SphinxDirective):
    has_content = True

    def run(self) -> list[nodes.Node]:
        node = graphviz()
        node["code"] = dot("\n".join(self.content))
        node["options"] = {"docname": self.env.docname}
        node["alt"] = "a state diagram with the same content as the tables"
        return [node]


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("mermaid", Mermaid)
    return {"parallel_read_safe": True}
