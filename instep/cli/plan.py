"""`instep plan`: what a run would need of memory, and what fits, from the model's config.json alone."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from instep.cli.output import emit_json

if TYPE_CHECKING:
    from rich.console import Console

    from instep.fitting import Option
    from instep.plan import Architecture, Needs

NOTE = (
    "Estimates: the constants behind them are not calibrated yet. What a run has really taken stands in its "
    "metrics.jsonl (memory_peak_bytes)."
)


def plan(
    model: str | None = typer.Option(
        None, "--model", help="Folder, config.json or Hub id (default: as in instep sft)."
    ),
    memory: str | None = typer.Option(
        None, "--memory", metavar="16GB", help="Memory of a machine; default: what is free on this one."
    ),
    engine: str | None = typer.Option(None, "--engine", help="torch, mlx or jax; default: all three."),
    length: int = typer.Option(2048, "--length", min=64, help="Row length of SFT, in tokens."),
    prompt: int = typer.Option(512, "--prompt", min=1, help="Prompt length of GRPO, in tokens."),
    settings: list[str] = typer.Option(
        [], "--set", metavar="NAME=VALUE", help="Settings of SFT or GRPO that memory depends on; repeatable."
    ),
    as_json: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
) -> None:
    """Estimate the memory of SFT and GRPO: what it goes to, what fits, at which length."""
    from instep.config import DEFAULT_MODEL
    from instep.fitting import USABLE_SHARE, budget_of, options, recommend
    from instep.models import decoder_config
    from instep.plan import COSTS, read_architecture, refuse_experts

    chosen = _engines(engine, list(COSTS))
    sft, grpo = _settings(settings)
    name = model or DEFAULT_MODEL
    config = decoder_config(name)
    refuse_experts(config)
    shape = read_architecture(config)
    budget, where = budget_of(memory) if memory else _here()
    found = options(shape, chosen, sft, grpo, length, prompt, budget)
    best, why = recommend(found, length, budget)
    result = {
        "model": name,
        "parameters": shape.parameters,
        "context": shape.context,
        "budget_bytes": budget,
        "budget": where,
        "usable_share": USABLE_SHARE,
        "length": length,
        "prompt": prompt,
        "calibrated": False,
        "recommended": None if best is None else best.name,
        "reason": why,
        "options": [_as_dict(one) for one in found],
    }
    if as_json:
        emit_json(result)
    else:
        _tell(result, shape, found, best)


def _engines(asked: str | None, known: list[str]) -> list[str]:
    """The one asked for, or all, first the one that this machine would take."""
    from instep.engines import choose
    from instep.errors import InputError

    if asked in (None, "all", "auto"):
        with contextlib.suppress(InputError):  # no engine is installed: any order will do
            first = choose("auto")[0]
            return sorted(known, key=lambda name: name != first)
        return known
    if asked not in known:
        raise InputError(f"engine {asked!r} is not known: expected one of {', '.join(known)}")
    return [asked]


def _settings(given: list[str]) -> tuple[Any, Any]:
    """The same overrides for both kinds of run, each taking those it has. Raises InputError for one of neither."""
    from instep.config import GrpoSettings, SftSettings
    from instep.errors import InputError
    from instep.settings_file import load_settings, parse_overrides, setting_names

    resolved = []
    names = {kind: setting_names(kind) for kind in (SftSettings, GrpoSettings)}
    for override in parse_overrides(given):
        if not any(override in known for known in names.values()):
            raise InputError(f"--set {override}: neither SFT nor GRPO has that setting")
    for kind, known in names.items():
        own = [one for one in given if one.partition("=")[0].strip() in known]
        resolved.append(load_settings(kind, None, own, base={}))
    return resolved[0], resolved[1]


def _here() -> tuple[int, str]:
    import psutil

    free = psutil.virtual_memory().available
    return free, f"{free / 1e9:.1f} GB free on this machine"


def _as_dict(option: Option) -> dict[str, Any]:
    return {
        "engine": option.setup.engine,
        "precision": option.precision,
        "gradient_checkpointing": option.setup.checkpointing,
        "available": option.available,
        "sft": _needs(option.sft),
        "sft_fits": option.sft_fits,
        "longest_row": option.longest,
        "grpo_sampling": _needs(option.sampling),
        "grpo_training": _needs(option.training),
        "grpo_fits": option.grpo_fits,
    }


def _needs(needs: Needs) -> dict[str, int]:
    return {**asdict(needs), "total": needs.total}


def _tell(result: dict[str, Any], shape: Architecture, found: list[Option], best: Option | None) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"{result['model']}: {shape.parameters / 1e6:,.0f} M parameters, {shape.layers} layers, context "
        f"{shape.context:,}; {result['budget']}",
        markup=False,
    )
    table = Table(
        "engine",
        "weights",
        "checkpointing",
        f"SFT at {result['length']:,}",
        "longest row",
        "GRPO",
        pad_edge=False,
    )
    for one in found:
        grpo = max(one.sampling.total, one.training.total)
        table.add_row(
            one.setup.engine,
            one.precision + ("" if one.available else " *"),
            "yes" if one.setup.checkpointing else "no",
            _fits(one.sft.total, one.sft_fits),
            f"{one.longest:,}" if one.longest else "none",
            _fits(grpo, one.grpo_fits),
        )
    console.print(table)
    if not all(one.available for one in found):
        console.print("* not there yet")
    shown = best or min(found, key=lambda one: one.sft.total)
    _tell_needs(console, shown)
    console.print(result["reason"], markup=False)
    console.print(NOTE, markup=False, style="dim")


def _fits(count: int, fits: bool) -> str:
    return f"{count / 1e9:.2f} GB" + ("" if fits else " ✗")


def _tell_needs(console: Console, option: Option) -> None:
    from rich.table import Table

    table = Table("GB", "SFT", "GRPO sampling", "GRPO training", title=option.name, pad_edge=False)
    table.title_justify = "left"
    phases = (option.sft, option.sampling, option.training)
    for name in asdict(option.sft):
        table.add_row(name.replace("_", " "), *(f"{getattr(phase, name) / 1e9:.3f}" for phase in phases))
    table.add_row("together", *(f"{phase.total / 1e9:.3f}" for phase in phases))
    console.print(table)
