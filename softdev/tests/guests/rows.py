"""Definition of the rows of the matrix of unmodified RDMA software, and of their packages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Software:
    """The packages of a program or library."""

    name: str
    package: str  # package whose version the page shows
    apt: tuple[str, ...] = ()
    pip: tuple[str, ...] = ()  # installed into a virtual environment with {python}
    then: tuple[str, ...] = ()  # commands after the installation; {venv} is its folder
    build: str = ""  # command that builds the program if it has no package
    tells: str = ""  # command that prints the version of the built program
    note: str = ""  # text below its rows on the page


@dataclass(frozen=True)
class Command:
    """A single program, or a client and its server."""

    client: str
    server: str = ""
    figure: str = ""  # pattern for the client's output; the group is the number
    times: float = 1.0  # factor that converts the number to the row's unit
    endless: bool = False  # whether the server runs until it is terminated


@dataclass(frozen=True)
class Row:
    """A row of the matrix.

    Its commands may contain {port} (a free port), {count}, {python}, {venv} and {here} (this
    folder). A short, traced run decides whether the row works. A second, untraced run measures the
    figure.
    """

    software: str
    name: str
    command: Command
    carries: int  # minimum bytes in work requests of the short run
    count: tuple[str, str] = ("", "")  # {count} for the short run and for the figure
    unit: str = ""
    tcp: Command | None = None  # the same test over TCP, without the device
    environment: Mapping[str, str] = field(default_factory=dict)
    tcp_environment: Mapping[str, str] = field(default_factory=dict)
    port: int = 0  # port of a server that always uses the same port
    says: str = ""  # pattern required in the output of the client or server
    quick: bool = False  # whether the row runs in CI
    fails: Mapping[str, str] = field(default_factory=dict)  # reason for a known failure, by link
    limit: float = 300.0  # seconds for each program, even on a busy machine

    @property
    def id(self) -> str:
        return f"{self.software}-{self.name}".replace(" ", "-")
