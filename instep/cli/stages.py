"""`instep run`: the stages of one file, each resumable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from instep.cli.output import emit_json


def run_file(
    file: str | None = typer.Argument(
        None, metavar="FILE", help="TOML file with [[stage]] tables, or a recipe such as gsm8k."
    ),
    run: str | None = typer.Option(
        None,
        "--run",
        help="Run folder; one that exists goes on where it stopped. Default runs/<time>-<file>.",
    ),
    model: str | None = typer.Option(None, "--model", help="Local folder or Hub id of the base model."),
    engine: str | None = typer.Option(None, "--engine", help="auto, or the engine's name."),
    settings: list[str] = typer.Option(
        [], "--set", metavar="NAME=VALUE", help="A setting of every stage, or STAGE.NAME=VALUE; repeatable."
    ),
    resume: bool = typer.Option(False, "--resume", help="Go on with the run in --run (default: the newest)."),
    dry_run: bool = typer.Option(
        False, "--dry-run", help="Check every stage and list them; load no weights."
    ),
    as_json: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
) -> None:
    """Run several stages (warm-up, reinforcement, evaluation) as one file says; finished ones are skipped."""
    from instep.cli.progress import ConsoleListener
    from instep.loops.stages import load_stages, open_stages, preflight, run_stages
    from instep.runs.folder import refuse_existing

    path = _folder(file, run, resume)
    source = file or str(path / "stages.toml")
    stages = load_stages(source, settings, {"model.path": model, "engine": engine})
    going_on = (path / "stages.toml").is_file()
    if not going_on:
        refuse_existing(path)
    lines = preflight(stages)
    if dry_run:
        if as_json:
            emit_json({"folder": str(path), "stages": lines})
        else:
            typer.echo("\n".join(lines))
        return
    stages = open_stages(path, stages, resume)
    with ConsoleListener() as listener:
        for line in lines:
            listener.note(line)
        summary = run_stages(path, stages, listener)
    if as_json:
        emit_json(summary)
    else:
        _tell(summary)
    if not summary["finished"]:
        raise typer.Exit(130)


def _folder(file: str | None, run: str | None, resume: bool) -> Path:
    from instep.errors import InputError
    from instep.runs.folder import STAGES, RunFolder, default_folder

    if run:
        if not file and not (Path(run) / STAGES).is_file():
            raise InputError(f"{run} is not a run of stages: it holds no {STAGES}; give the file to run")
        return Path(run)
    if resume:
        found = [path.parent for path in Path("runs").glob(f"*/{STAGES}")]
        for path in sorted(found, key=lambda p: p.stat().st_mtime, reverse=True):
            if not (RunFolder(path).read_summary() or {}).get("finished"):
                return path
        raise InputError("--resume: no unfinished run of stages in runs/; name one with --run FOLDER")
    if not file:
        raise InputError("give a file of stages, or a recipe: instep run gsm8k")
    return default_folder(Path(file).stem)


def _tell(summary: dict[str, Any]) -> None:
    from rich.console import Console

    from instep.cli.evaluate import tell_result
    from instep.cli.progress import duration

    console = Console(highlight=False, soft_wrap=True)
    for one in summary["stages"]:
        told = one["summary"] or {"finished": False}
        if not told["finished"]:
            console.print(
                f"Stopped in stage {one['stage']}; everything so far is kept. Go on with:", markup=False
            )
            console.print(f"  instep run --resume --run {summary['folder']}", markup=False)
            return
        seconds = told.get("training_seconds", told.get("seconds", 0.0))
        steps = f", {told['steps']} steps" if "steps" in told else ""
        console.print(f"{one['stage']} ({one['kind']}): {duration(seconds)}{steps}", markup=False)
    if summary["evaluation"]:
        tell_result(summary["evaluation"])
    console.print(f"run folder: {summary['folder']}", markup=False)
