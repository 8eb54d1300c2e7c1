"""`instep selftest`: prove an engine on this machine, with a report to paste."""

from __future__ import annotations

import sys
from dataclasses import asdict

import typer

from instep.cli.output import emit_json

FAILED = 1
"""Exit code where a check fails."""


def selftest(
    engine: str = typer.Option("auto", "--engine", help="auto, or the engine's name."),
    model: str | None = typer.Option(
        None, "--model", help="Local folder or Hub id; default SmolLM2-135M-Instruct."
    ),
    length: int = typer.Option(512, "--length", min=16, help="Tokens of the row that is timed."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
) -> None:
    """Compare an engine's step on this machine's device with the CPU's; measure speed and memory; print a report."""
    from instep import engines
    from instep.config import DEFAULT_MODEL
    from instep.loops.selftest import run_selftest
    from instep.models import resolve

    name = engines.choose(engine)[0]
    folder = resolve(model or DEFAULT_MODEL)

    def say(text: str) -> None:
        print(f"  {text}", file=sys.stderr, flush=True)

    report = run_selftest(name, folder, length, say)
    if as_json:
        emit_json({"passed": report.passed, **asdict(report)})
    else:
        print(report.markdown())
    if not report.passed:
        raise typer.Exit(FAILED)
