"""The command line: mounts the commands and turns InputError into one line and exit code 2.

Command modules import what they need inside their functions, so that `instep --help` stays fast.
"""

from __future__ import annotations

import os
import sys

import typer

from instep import __version__
from instep.cli import (
    adapter,
    chat,
    convert,
    data,
    doctor,
    evaluate,
    export,
    fuse,
    generate,
    grpo,
    plan,
    publish,
    quickstart,
    runs,
    selftest,
    sft,
    stages,
)
from instep.errors import InputError, TrainingError

BROKEN_PIPE = 141
"""What a shell reports for a process that SIGPIPE has ended."""

app = typer.Typer(
    name="instep",
    help="Post-train language models on the machine you own.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(data.app, name="data")
app.add_typer(runs.app, name="runs")
app.add_typer(adapter.app, name="adapter")
app.command("convert")(convert.convert)
app.command("plan")(plan.plan)
app.command("doctor")(doctor.doctor)
app.command("selftest")(selftest.selftest)
app.command("quickstart")(quickstart.quickstart)
app.command("sft")(sft.sft)
app.command("grpo")(grpo.grpo)
app.command("eval")(evaluate.evaluate)
app.command("run")(stages.run_file)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("fuse")(fuse.fuse)
app.command("export")(export.export)
app.command("publish")(publish.publish)


def _version(show: bool) -> None:
    if show:
        typer.echo(f"instep {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version."
    ),
) -> None:
    pass


def main() -> None:
    try:
        app()
    except BrokenPipeError:  # the reader of a pipe has had enough: `instep data show FILE | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(BROKEN_PIPE)
    except InputError as error:
        print(f"instep: {error}", file=sys.stderr)
        sys.exit(2)
    except TrainingError as error:
        print(f"instep: {error}", file=sys.stderr)
        sys.exit(1)
