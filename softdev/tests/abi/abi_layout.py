"""List every size, offset, kind of field and constant that a C header declares.

The compiler determines the layout: this module writes a C program that prints it. The program names
only what *our* header declares, so that it also compiles against another header with the same
names. Each line is one fact, for instance `struct ibv_sge.lkey offset 12 size 4 unsigned`.
"""

import re
import subprocess
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

# pycparser has no type stubs. It is installed with cffi, which uses it to parse these headers.
from pycparser import c_ast, c_parser  # type: ignore[import-untyped]

COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
DEFINE = re.compile(r"^#define\s+(\w+)\s+.*$", re.MULTILINE)

# System types that abi.h uses. The parser needs only their names.
SYSTEM_TYPES = """
typedef int uint8_t, uint16_t, uint32_t, uint64_t, size_t, pthread_mutex_t, pthread_cond_t;
typedef int socklen_t;
struct timespec { int x; };
struct sockaddr { int x; }; struct sockaddr_in { int x; };
struct sockaddr_in6 { int x; }; struct sockaddr_storage { int x; };
"""

# The kind distinguishes pointers, integers and structures that have the same offset and size.
# __builtin_classify_type() returns 5 for pointers and 1 for integers. Arrays decay to pointers, so
# their kind is 5 in both headers.
PROGRAM = """
#include <stddef.h>
#include <stdio.h>

#define SIGN(x) ((__typeof__(x))-1 < (__typeof__(x))1 ? "signed" : "unsigned")
#define SIZE(type) printf(#type " size %zu align %zu\\n", sizeof(type), _Alignof(type))
#define FIELD(type, field) \\
    printf(#type "." #field " offset %zu size %zu kind %d\\n", offsetof(type, field), \\
           sizeof(((type *)0)->field), __builtin_classify_type(((type *)0)->field))
#define INTEGER(type, field) \\
    printf(#type "." #field " %s\\n", SIGN(((type *)0)->field))
#define CONSTANT(name) printf(#name " = %lld\\n", (long long)(name))
"""


def parse(source: str) -> tuple[list[str], c_ast.FileAST]:
    """Return the macro names in a header, and the syntax tree of the rest."""
    source = COMMENT.sub("", source)
    tree = c_parser.CParser().parse(SYSTEM_TYPES + DEFINE.sub("", source))
    return DEFINE.findall(source), tree


class Lister(c_ast.NodeVisitor):  # type: ignore[misc]
    """Visitor that builds the statements that print a header's types and constants in order."""

    def __init__(self) -> None:
        self.statements: list[str] = []

    def visit_Enum(self, node: c_ast.Enum) -> None:
        if node.name:
            self.statements.append(f"SIZE(enum {node.name})")
        if node.values:
            self.statements += [f"CONSTANT({item.name})" for item in node.values.enumerators]

    def visit_Struct(self, node: c_ast.Struct) -> None:
        self.aggregate("struct", node)

    def visit_Union(self, node: c_ast.Union) -> None:
        self.aggregate("union", node)

    def aggregate(self, keyword: str, node: c_ast.Node) -> None:
        if node.name and node.decls and not node.name.startswith(("sockaddr", "timespec")):
            self.statements.append(f"SIZE({keyword} {node.name})")
            self.statements += fields(f"{keyword} {node.name}", node, "")
        self.generic_visit(node)


def fields(type_name: str, node: c_ast.Node, path: str) -> Iterator[str]:
    """Yield the statements that print each field, including the fields of anonymous structures."""
    for field in node.decls:
        inner = getattr(field.type, "type", field.type)
        nameless = isinstance(inner, c_ast.Struct | c_ast.Union) and inner.name is None
        if field.name:
            yield f"FIELD({type_name}, {path}{field.name})"
        if nameless:
            yield from fields(type_name, inner, f"{path}{field.name}." if field.name else path)
        elif is_integer(field.type):
            yield f"INTEGER({type_name}, {path}{field.name})"


def is_integer(declaration: c_ast.Node) -> bool:
    """Return whether a field is an integer or an enum. The opaque pthread types are neither."""
    if not isinstance(declaration, c_ast.TypeDecl):
        return False
    if isinstance(declaration.type, c_ast.Enum):
        return True
    return isinstance(declaration.type, c_ast.IdentifierType) and not any(
        name.startswith("pthread_") for name in declaration.type.names
    )


def program(headers: Sequence[Path], without: Collection[str] = ()) -> str:
    """Return the C program, omitting the constants in `without`. The caller adds the includes."""
    lister = Lister()
    defines, tree = parse("".join(path.read_text() for path in headers))
    lister.visit(tree)
    lister.statements += [f"CONSTANT({name})" for name in defines]
    left_out = {f"CONSTANT({name})" for name in without}
    kept = [statement for statement in lister.statements if statement not in left_out]
    body = "\n".join(f"\t{statement};" for statement in kept)
    return f"{PROGRAM}\nint main(void)\n{{\n{body}\n\treturn 0;\n}}\n"


def preprocessed(declarations: str) -> str:
    """Return the preprocessor output for `#include` lines."""
    command = ["cc", "-std=gnu11", "-E", "-P", "-"]
    done = subprocess.run(command, input=declarations, capture_output=True, text=True, check=False)
    return done.stdout  # if this fails, compiling the program fails, too


class CompileError(Exception):
    """The compiler rejected the program. The message is the compiler's output."""


def build(source: str, output: Path, arguments: Sequence[str]) -> Path:
    """Compile `source` to `output`, with `arguments` after the source file as libraries require."""
    path = output.with_suffix(".c")
    path.write_text(source)
    command = ["cc", "-std=gnu11", "-Wall", "-Werror", "-o", str(output), str(path), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CompileError(done.stderr)
    return output


def run(path: Path) -> list[str]:
    """Run a program and return the lines that it prints."""
    return subprocess.run([path], capture_output=True, text=True, check=True).stdout.splitlines()
