"""`instep eval`: how well a model, and an adapter beside it, answers tasks that can be checked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from instep.cli.output import emit_json

SHARES = ("accuracy", "format_rate", "strict_format_rate", "no_answer_rate", "truncated_share")


def evaluate(
    target: str = typer.Argument(
        metavar="RUN|MODEL", help="Run folder, adapter folder, model folder or Hub id."
    ),
    task: str | None = typer.Option(
        None, "--task", help="gsm8k, a reasoning-gym dataset, or a JSONL file; default: the run's own."
    ),
    n: int | None = typer.Option(None, "--n", help="So many tasks of the split; default 200."),
    samples: int | None = typer.Option(
        None, "--samples", help="Completions drawn for each task, for pass@k and majority@k; default none."
    ),
    temperature: float | None = typer.Option(None, "--temperature", help="Of those samples; default 1.0."),
    k: str | None = typer.Option(None, "--k", metavar="1,4,8", help="The k of pass@k and majority@k."),
    max_new_tokens: int | None = typer.Option(
        None, "--max-new-tokens", help="Longest completion; default: the run's own, or 256."
    ),
    config: str | None = typer.Option(None, "--config", help="TOML file with settings of the evaluation."),
    engine: str | None = typer.Option(None, "--engine", help="auto, or the engine's name."),
    settings: list[str] = typer.Option([], "--set", metavar="NAME=VALUE", help="Any setting; repeatable."),
    output: Path | None = typer.Option(
        None, "-o", "--output", help="Result file; default RUN/evaluations/<time>-<task>.json."
    ),
    as_json: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
) -> None:
    """Measure accuracy and format on held-out tasks, the base model and the adapter side by side."""
    from instep.cli.progress import ConsoleListener
    from instep.loops.evaluate import refuse_existing_file, result_file, run_evaluation, store

    flags = {
        "task.name": task,
        "tasks": n,
        "samples": samples,
        "temperature": temperature,
        "k": _numbers(k),
        "max_new_tokens": max_new_tokens,
        "engine": engine,
    }
    resolved, run = _settings(target, config, settings, flags)
    if output:
        refuse_existing_file(output)
    with ConsoleListener() as listener:
        evaluation = run_evaluation(resolved, listener)
    if evaluation is None:
        typer.echo("instep: stopped; nothing was written", err=True)
        raise typer.Exit(130)
    file = output or (result_file(run, resolved.task.name) if run else None)
    if file:
        store(evaluation, file)
    result = {**evaluation.result, "file": str(file) if file else None}
    if as_json:
        emit_json(result)
    else:
        tell_result(result)


def _settings(
    target: str, config: str | None, overrides: list[str], flags: Mapping[str, Any]
) -> tuple[Any, Any]:
    """(settings, run folder). Raises InputError."""
    from instep.config import EvaluationSettings
    from instep.errors import InputError
    from instep.loops.evaluate import settings_of
    from instep.settings_file import load_settings, parse_overrides, read_tree

    in_file = read_tree(config).get("task", {}) if config else {}
    asked = flags["task.name"] or parse_overrides(overrides).get("task.name") or in_file.get("name")
    base, run = settings_of(target, asked)
    if not asked and not base.get("task", {}).get("name"):
        raise InputError(
            f"{target} does not say which task to evaluate: give --task, such as --task gsm8k or --task chain_sum"
        )
    return load_settings(EvaluationSettings, config, overrides, flags, base), run


def _numbers(text: str | None) -> list[int] | None:
    from instep.errors import InputError

    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"--k {text!r}: expected whole numbers, such as --k 1,4,8") from None


def tell_result(result: dict[str, Any]) -> None:
    """The metrics as a table, one column for each model and way of sampling."""
    from rich.console import Console
    from rich.table import Table

    from instep.cli.progress import duration

    columns = {
        f"{model}\n{mode}": metrics
        for model, modes in result["results"].items()
        for mode, metrics in modes.items()
    }
    table = Table(title=f"{result['split']}, {result['tasks']} tasks", title_justify="left")
    table.add_column("")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    high = f"{result['split']} accuracy_high"
    names = list(dict.fromkeys(name for metrics in columns.values() for name in metrics))
    for name in names:
        short = name.removeprefix(f"{result['split']} ")
        if short == "accuracy_low":
            cells = (f"{m[name] * 100:.1f}–{m[high]:.1%}" for m in columns.values())
            table.add_row(f"  {result['confidence']:.0%} interval", *cells)
        if short in ("accuracy_low", "accuracy_high"):
            continue
        table.add_row(name.replace("_", " "), *(_cell(metrics, name, short) for metrics in columns.values()))
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    console.print(
        f"Wilson intervals; {duration(result['seconds'])} on {result['device']} in {result['precision']}",
        markup=False,
    )
    if result["comparison_timeouts"]:
        console.print(
            f"{result['comparison_timeouts']} answers could not be compared in time: counted as wrong"
        )
    if result.get("file"):
        console.print(f"result: {result['file']}", markup=False)


def _cell(metrics: Mapping[str, float], name: str, short: str) -> str:
    if name not in metrics:
        return "–"
    value = metrics[name]
    return f"{value:.1%}" if short in SHARES or "_at_" in short else f"{value:.1f}"
