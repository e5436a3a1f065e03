"""`aiordma doctor`: what prevents the use of RDMA on this machine, and what to do."""

from __future__ import annotations

import json
from dataclasses import asdict

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .checks import NOTHING, ONLY_EMBEDDED, READY, Finding, Verdict, examine, exit_status
from .facts import Facts

COLOURS = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.PROBLEM: "bold red"}
SUMMARY = {
    READY: "RDMA devices of this machine can be used.",
    ONLY_EMBEDDED: "Only the embedded device can be used.",
    NOTHING: "Neither a device of the system nor the embedded device can be used.",
}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(as_json: bool) -> None:
    """Check whether this machine can use RDMA.

    It checks libraries, kernel, providers, permissions, the limit on locked memory, ports, GIDs,
    fork(), containers and the embedded device, which device programs use, and says what to change.

    The exit status is 0 when an RDMA device of the system can be used, 1 when only the embedded
    device can, and 3 when neither can. Warnings do not change it.
    """
    facts = Facts.collect()
    findings = examine(facts)
    status = exit_status(facts, findings)
    if as_json:
        click.echo(to_json(findings, status))
    else:
        show(Console(), findings, status)
    raise SystemExit(status)


def to_json(findings: list[Finding], status: int) -> str:
    return json.dumps(
        {
            "status": status,
            "summary": SUMMARY[status],
            "findings": [asdict(finding) for finding in findings],
        },
        indent=2,
    )


def show(console: Console, findings: list[Finding], status: int) -> None:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("verdict")
    table.add_column("check")
    table.add_column("what was found, and what to do", overflow="fold")
    for finding in findings:
        told = escape(finding.text)
        if finding.advice:
            told += f"\n[bold]-> {escape(finding.advice)}[/]"
        table.add_row(
            f"[{COLOURS[finding.verdict]}]{finding.verdict}[/]", escape(finding.check), told
        )
    console.print(table)
    console.print(SUMMARY[status], highlight=False)
