"""`instep adapter`: adapters as files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from instep.cli.output import emit_json

if TYPE_CHECKING:
    from instep.adapter_diff import AdapterDiff

app = typer.Typer(
    name="adapter",
    help="Adapters as files: compare and convert them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
SHOWN_LAYERS = 12
DIFFERENT = 1
"""Exit code where the difference is above --tolerance."""


@app.command("diff")
def diff(
    first: Path = typer.Argument(..., metavar="A", help="Run or PEFT adapter folder."),
    second: Path = typer.Argument(..., metavar="B", help="Run or PEFT adapter folder."),
    tolerance: float | None = typer.Option(
        None, "--tolerance", min=0, help="Exit with code 1 where the relative difference is larger."
    ),
    every: bool = typer.Option(
        False, "--all", help=f"Every layer, not only the {SHOWN_LAYERS} that differ most."
    ),
    as_json: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
) -> None:
    """Compare two adapters by what they add to the model's weights: the products of their matrices."""
    from instep.adapter_diff import compare_adapters
    from instep.adapters import load_adapter
    from instep.loops.run import adapter_folder

    found = compare_adapters(load_adapter(adapter_folder(first)), load_adapter(adapter_folder(second)))
    same = tolerance is None or found.relative <= tolerance
    if as_json:
        emit_json({"first": str(first), "second": str(second), "within_tolerance": same, **found.as_dict()})
    else:
        _tell(found, every)
    if not same:
        raise typer.Exit(DIFFERENT)


@app.command("convert")
def convert(
    source: Path = typer.Argument(..., metavar="ADAPTER", help="Run, PEFT or mlx-lm adapter folder."),
    output: Path = typer.Option(..., "-o", "--output", help="Folder to write; it must not exist."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
) -> None:
    """Convert an adapter between PEFT's form and mlx-lm's: what it is not is written, read back and compared."""
    from instep import adapters_mlx_lm
    from instep.adapter_diff import compare_adapters
    from instep.adapters import base_model_of, load_adapter, save_adapter
    from instep.engines.base import EngineState
    from instep.errors import InputError
    from instep.loops.run import adapter_folder

    if output.exists():
        raise InputError(f"{output} exists already: give -o a folder that does not")
    if adapters_mlx_lm.is_mlx_lm(source):
        matrices, settings, base = adapters_mlx_lm.read(source)
        save_adapter(output, EngineState(matrices, {}, {}, 0), settings, base)
        form, again = "peft", load_adapter(output)
    else:
        folder = adapter_folder(source)
        matrices, settings = load_adapter(folder)
        adapters_mlx_lm.write(output, matrices, settings, base_model_of(folder))
        form, again = "mlx-lm", adapters_mlx_lm.read(output)[:2]
    apart = compare_adapters((matrices, settings), again).relative
    if as_json:
        emit_json({"source": str(source), "output": str(output), "form": form, "relative_difference": apart})
    else:
        print(f"{output}: {form} adapter of rank {settings.rank}, {len(matrices) // 2} layers")
        print(f"read back: relative difference {apart:.1e}")


def _tell(found: AdapterDiff, every: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    layers = sorted(found.layers, key=lambda layer: layer.relative, reverse=True)
    shown = layers if every else layers[:SHOWN_LAYERS]
    table = Table(pad_edge=False)
    table.add_column("layer", no_wrap=True)
    for name in ("difference", "cosine", "of A", "of B"):
        table.add_column(name)
    for layer in shown:
        matrices = [f"{value:.2e}" for value in layer.matrices] if layer.matrices else ["other rank"] * 2
        table.add_row(
            layer.module.removeprefix("model."), f"{layer.relative:.2e}", _cosine(layer.cosine), *matrices
        )
    if shown:
        console.print(table)
    if len(shown) < len(layers):
        console.print(f"and {len(layers) - len(shown)} layers that differ less (--all shows them)")
    for name, names in zip("AB", found.only, strict=True):
        for module in names:
            console.print(f"only in {name}: {module}", markup=False)
    console.print(
        f"all layers: relative difference {found.relative:.3e}, cosine {_cosine(found.cosine)}, "
        f"norms {found.norms[0]:.4g} and {found.norms[1]:.4g}"
    )


def _cosine(value: float | None) -> str:
    return "–" if value is None else f"{value:.6f}"
