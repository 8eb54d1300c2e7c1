"""`instep grpo`: reinforcement with rewards that can be checked."""

from __future__ import annotations

from typing import Any

import typer

from instep.cli.output import emit_json


def grpo(
    config: str | None = typer.Option(
        None, "--config", help="TOML file, or a recipe: smoke_test, default, …"
    ),
    model: str | None = typer.Option(None, "--model", help="Local folder or Hub id of the base model."),
    task: str | None = typer.Option(None, "--task", help="gsm8k, a reasoning-gym dataset, or a JSONL file."),
    run: str | None = typer.Option(None, "--run", help="Run folder; default runs/<time>-<model>."),
    engine: str | None = typer.Option(None, "--engine", help="auto, or the engine's name."),
    settings: list[str] = typer.Option([], "--set", metavar="NAME=VALUE", help="Any setting; repeatable."),
    resume: bool = typer.Option(False, "--resume", help="Go on with the run in --run (default: the newest)."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
) -> None:
    """Train an adapter by sampling answers to tasks and rewarding what can be checked."""
    from instep.cli.progress import ConsoleListener
    from instep.cli.resume import settings_for
    from instep.config import GrpoSettings
    from instep.loops.grpo_run import run_grpo

    flags = {"model.path": model, "task.name": task, "run.folder": run, "engine": engine}
    resolved = settings_for(GrpoSettings, config, settings, flags, resume)
    with ConsoleListener() as listener:
        summary = run_grpo(resolved, listener, resume)
    if as_json:
        emit_json(summary)
    else:
        _tell(summary)
    if not summary["finished"]:
        raise typer.Exit(130)


def _tell(summary: dict[str, Any]) -> None:
    from rich.console import Console

    from instep.cli.progress import duration, say_stopped

    console = Console(highlight=False, soft_wrap=True)
    if not summary["finished"]:
        say_stopped(console, "grpo", summary)
        return
    before, after = summary["validation_before"], summary["validation_after"]
    if before and after:
        for name in (key for key in before if key.startswith("reward") and key in after):
            console.print(f"held-out {name}: {before[name]:.3f} → {after[name]:.3f}", markup=False)
    console.print(
        f"{summary['steps']} steps, {summary['rollouts']:,} completions in {duration(summary['training_seconds'])}; "
        f"adapter: {summary['adapter_from']}",
        markup=False,
    )
    console.print(f"run folder: {summary['folder']}", markup=False)
