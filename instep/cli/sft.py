"""`instep sft`: supervised fine-tuning on conversations."""

from __future__ import annotations

from typing import Any

import typer

from instep.cli.output import emit_json


def sft(
    config: str | None = typer.Option(None, "--config", help="TOML file, or the name of a shipped recipe."),
    model: str | None = typer.Option(None, "--model", help="Local folder or Hub id of the base model."),
    data: str | None = typer.Option(None, "--data", help="Conversations, or session files and folders."),
    run: str | None = typer.Option(None, "--run", help="Run folder; default runs/<time>-<model>."),
    engine: str | None = typer.Option(None, "--engine", help="auto, or the engine's name."),
    settings: list[str] = typer.Option([], "--set", metavar="NAME=VALUE", help="Any setting; repeatable."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Show what would be trained on; load no weights."),
    resume: bool = typer.Option(False, "--resume", help="Go on with the run in --run (default: the newest)."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
) -> None:
    """Train an adapter on what the assistant said in your conversations."""
    from instep.cli.progress import ConsoleListener
    from instep.cli.resume import settings_for
    from instep.config import SftSettings
    from instep.loops.sft_run import run_sft

    flags = {"model.path": model, "data.path": data, "run.folder": run, "engine": engine}
    resolved = settings_for(SftSettings, config, settings, flags, resume)
    if dry_run:
        _dry_run(resolved, as_json)
        return
    with ConsoleListener() as listener:
        summary = run_sft(resolved, listener, resume)
    if as_json:
        emit_json(summary)
    else:
        tell_summary(summary)
    if not summary["finished"]:
        raise typer.Exit(130)


def _dry_run(resolved: Any, as_json: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    from instep.loops.sft_data import prepare

    report = prepare(resolved).report()
    if as_json:
        emit_json(report)
        return
    table = Table("", "train", "held out", title="What would be trained on", title_justify="left")
    for name in report["train"]:
        if name == "dropped_turns":
            continue
        table.add_row(
            name.replace("_", " "), *(_cell(name, report[split][name]) for split in ("train", "validation"))
        )
    for reason in sorted({r for split in ("train", "validation") for r in report[split]["dropped_turns"]}):
        cells = (str(report[split]["dropped_turns"].get(reason, 0)) for split in ("train", "validation"))
        table.add_row(f"turns left out: {reason}", *cells)
    console = Console(highlight=False)
    console.print(table)
    for name, choice in report["choices"].items():
        console.print(f"{name}: {choice}", markup=False)
    console.print(f"{report['steps_per_epoch']} optimizer steps an epoch")


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "–"
    if name.endswith("share"):
        return f"{value:.1%}"
    return f"{value:,}"


def tell_summary(summary: dict[str, Any]) -> None:
    """The end of a run, for a person."""
    from rich.console import Console

    from instep.cli.progress import duration, say_stopped

    console = Console(highlight=False, soft_wrap=True)

    def say(text: str) -> None:
        console.print(text, markup=False)

    if not summary["finished"]:
        say_stopped(console, "sft", summary)
        return
    before, after = summary["validation_before"], summary["validation_after"]
    if before and after:
        say(
            f"held-out loss {before['loss']:.4f} → {after['loss']:.4f}, "
            f"token accuracy {before['token_accuracy']:.1%} → {after['token_accuracy']:.1%}"
        )
    say(
        f"{summary['steps']} steps on {summary['supervised_tokens']:,} supervised tokens in "
        f"{duration(summary['training_seconds'])}; adapter: {summary['adapter_from']}"
    )
    say(f"run folder: {summary['folder']}")
