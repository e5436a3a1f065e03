"""What a row of the matrix of unmodified RDMA software is, and what its packages are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Software:
    """A program or stack as it is packaged."""

    name: str
    package: str  # whose version is told
    apt: tuple[str, ...] = ()
    pip: tuple[str, ...] = ()  # into a virtual environment, where {python} is
    then: tuple[str, ...] = ()  # commands after that; {venv} is its folder
    build: str = ""  # a command that builds what there is no package of, unless it has
    tells: str = ""  # and one that prints the version of that
    note: str = ""  # what the page says below its rows


@dataclass(frozen=True)
class Command:
    """One program, or a server and its client."""

    client: str
    server: str = ""
    figure: str = ""  # a pattern whose group is the number, in the client's output
    times: float = 1.0  # what makes that number one of the row's unit
    endless: bool = False  # its server serves until it is terminated


@dataclass(frozen=True)
class Row:
    """Commands name {port}, a free one, {count}, {python}, {venv} and {here}, this folder.

    A row runs twice: traced and short, which is the verdict, then untraced for its figure.
    """

    software: str
    name: str
    command: Command
    carries: int  # bytes that the short run must have sent by work requests of the device
    count: tuple[str, str] = ("", "")  # of the short run, and of the one for the figure
    unit: str = ""
    tcp: Command | None = None  # the same over TCP, without the device
    environment: Mapping[str, str] = field(default_factory=dict)
    tcp_environment: Mapping[str, str] = field(default_factory=dict)
    port: int = 0  # of a server that cannot be told one
    says: str = ""  # a pattern that the output of client or server must have
    quick: bool = False  # in the part that runs in CI
    fails: Mapping[str, str] = field(default_factory=dict)  # why, for each link
    limit: float = 300.0  # seconds for each program, however busy the machine is

    @property
    def id(self) -> str:
        return f"{self.software}-{self.name}".replace(" ", "-")
