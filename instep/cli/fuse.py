"""`instep fuse`: a run's adapter made part of the model's weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from instep.cli.output import emit_json

if TYPE_CHECKING:
    from instep.config import GenerationSettings


def fuse(
    run: str = typer.Argument(..., metavar="RUN", help="Run or adapter folder."),
    output: Path = typer.Option(..., "-o", "--output", help="Folder of the new model."),
    model: str | None = typer.Option(None, "--model", help="Base model; default: the one it was trained on."),
    precision: str = typer.Option(
        "auto", "--precision", help="auto (as the base is stored), bfloat16, float16 or float32."
    ),
    engine: str = typer.Option(
        "auto", "--engine", help="The engine that compares the two; auto, or its name."
    ),
    check: bool = typer.Option(
        True, "--check/--no-check", help="Compare fused with adapter on a few tokens."
    ),
    allow_loss: bool = typer.Option(
        False, "--allow-loss", help="Also where rounding erases more than a tenth of the adapter."
    ),
    as_json: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
) -> None:
    """Fuse a LoRA adapter into the model: a Hugging Face folder that needs no adapter."""
    settings = trained_adapter(run, model)
    result = fuse_into(settings, output, precision, allow_loss, engine if check else None)
    if as_json:
        emit_json(result)
        return
    typer.echo(f"fused {result['layers']} layers into {result['precision']}, {result['bytes'] / 1e6:.0f} MB")
    typer.echo(
        f"{result['survived']:.1%} of the adapter survives the rounding (cosine {result['cosine']:.4f})"
    )
    if found := result["check"]:
        typer.echo(
            f"log-probabilities of {found['tokens']} tokens differ from those with the adapter by "
            f"{found['mean_difference']:.2g} nats (largest {found['largest_difference']:.2g}); "
            f"the adapter itself changes them by {found['adapter_effect']:.2g}"
        )
    typer.echo(f"model: {output}")


def trained_adapter(run: str, model: str | None) -> GenerationSettings:
    """The base model and adapter of a run or adapter folder. Raises InputError where it has no adapter."""
    from instep.chat.model import generation_settings
    from instep.errors import InputError

    settings = generation_settings(None, {"adapter": run, "model.path": model})
    if settings.adapter is None:
        raise InputError(
            f"run {run} trained every parameter: {settings.model.path} is the whole model already"
        )
    return settings


def fuse_into(
    settings: GenerationSettings, output: Path, precision: str, allow_loss: bool, engine: str | None
) -> dict[str, Any]:
    """Fuse, and compare where an engine is given; a model that fails the comparison is removed again."""
    import shutil

    from instep import engines, models
    from instep.errors import InputError
    from instep.loops.run import adapter_folder
    from instep.publishing.fuse import fuse as fuse_folder
    from instep.publishing.fuse import refuse_filled
    from instep.publishing.tensors import TYPES
    from instep.publishing.verify import verify

    if precision not in ("auto", *TYPES):
        raise InputError(f"--precision {precision}: expected auto, {', '.join(TYPES)}")
    refuse_filled(output)
    if engine is not None:
        engines.choose(engine)
    assert settings.adapter is not None
    base = models.resolve(settings.model.path, settings.model.revision)
    report = fuse_folder(base, adapter_folder(settings.adapter), output, precision, allow_loss)
    found = None
    if engine is not None:
        try:
            found = verify(settings.model, base, settings.adapter, output, engine, report.precision).as_dict()
        except BaseException:
            shutil.rmtree(output, ignore_errors=True)
            raise
    return {"folder": str(output), **report.as_dict(), "check": found}
