"""`aiordma doctor`: diagnose RDMA problems on this machine and suggest fixes."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict

import click
from rich.console import Console
from rich.markup import escape

import aiordma

from .doctor_checks import Conclusion, Finding, Verdict, conclude, examine
from .doctor_facts import Facts
from .tables import table

COLOURS = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.PROBLEM: "bold red"}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(as_json: bool) -> None:
    """Check whether this machine can use RDMA.

    The checks cover libraries, the kernel, providers, permissions, the limit on locked memory,
    ports, GIDs, fork(), containers, the embedded device, and the device that programs use. Each
    problem and each warning comes with advice on how to fix it.

    The exit status is 0 if the device that programs use works, whether it is a device of the system
    or the embedded device. It is 1 if only the embedded device works, but programs look for another
    one, for example because of AIORDMA_DEVICE=system. It is 3 if no device works. Warnings do not
    affect the exit status.
    """
    facts = Facts.collect()
    findings = examine(facts)
    conclusion = conclude(facts, findings)
    if as_json:
        report = {
            "status": conclusion.status,
            "summary": conclusion.text,
            "versions": {
                "aiordma": aiordma.__version__,
                "python": platform.python_version(),
                "system": platform.platform(),
            },
            "findings": [asdict(finding) for finding in findings],
        }
        click.echo(json.dumps(report, indent=2))
    else:
        show(Console(), findings, conclusion)
    raise SystemExit(conclusion.status)


def show(console: Console, findings: list[Finding], conclusion: Conclusion) -> None:
    rows = table("verdict", "check", "finding and advice")
    for finding in findings:
        text = escape(finding.text)
        if finding.advice:
            text += f"\n[bold]-> {escape(finding.advice)}[/]"
        colour = COLOURS[finding.verdict]
        rows.add_row(f"[{colour}]{finding.verdict}[/]", escape(finding.check), text)
    console.print(rows)
    console.print(conclusion.text, highlight=False)
