"""`instep doctor`: is this machine, and this installation, fit to train?"""

from __future__ import annotations

from dataclasses import asdict

import typer

from instep.cli.output import emit_json

PROBLEM = 1
"""Exit code where something does not work."""
MARKS = {"ok": "ok", "warning": "look", "problem": "WRONG"}


def doctor(
    engine: list[str] | None = typer.Option(None, "--engine", help="Only this engine; may be repeated."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
) -> None:
    """Look at machine, disk, packages and the Hub, and check every engine's step against a stored one."""
    from rich.console import Console

    from instep.engines import ENGINES
    from instep.errors import InputError
    from instep.loops.doctor import examine

    for name in engine or []:
        if name not in ENGINES:
            raise InputError(f"engine {name!r} is not known: expected one of {', '.join(ENGINES)}")
    console = Console(highlight=False, soft_wrap=True)
    if as_json:
        found = examine(engine)
        emit_json({"findings": [asdict(one) for one in found]})
    else:
        with console.status("looking around (each engine takes a few seconds)"):
            found = examine(engine)
        for one in found:
            console.print(f"{MARKS[one.level]:<6}{one.name}: {one.value}", markup=False)
            if one.level != "ok" and one.advice:
                console.print(f"      {one.advice}", markup=False)
    if any(one.level == "problem" for one in found):
        raise typer.Exit(PROBLEM)
