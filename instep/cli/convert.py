"""`instep convert`: models between Hugging Face's form and MLX's."""

from __future__ import annotations

from pathlib import Path

import typer

from instep.cli.output import emit_json

PROBE = """\
The quick brown fox jumps over the lazy dog. To find the sum of a list, start at zero and add each number in turn:

def total(numbers):
    result = 0
    for number in numbers:
        result += number
    return result

{"path": "README.md", "lines": [1, 20]}
"""
"""Text that the model before and the model after are compared on."""


def convert(
    model: str = typer.Argument(..., metavar="MODEL", help="Local folder or Hugging Face Hub id."),
    output: Path = typer.Option(..., "-o", "--output", help="Folder to write; it must not exist."),
    bits: int | None = typer.Option(
        None, "--bits", help="Quantize to so many bits a weight: 2, 3, 4, 5, 6, 8."
    ),
    group_size: int | None = typer.Option(
        None, "--group-size", help="Weights that share a scale; default 64 (mxfp4: 32, nvfp4: 16)."
    ),
    mode: str = typer.Option("affine", "--mode", help="affine, mxfp4 or nvfp4."),
    recipe: str | None = typer.Option(
        None, "--recipe", help="Mixed bits: mixed_2_6, mixed_3_4, mixed_3_6 or mixed_4_6."
    ),
    to: str = typer.Option("mlx", "--to", help="mlx, or hf: an MLX model back to Hugging Face safetensors."),
    revision: str | None = typer.Option(None, "--revision", help="Hub revision."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
) -> None:
    """Convert a model to MLX, quantized if asked for, and back; the result is loaded and compared with the original."""
    from instep import engines
    from instep.errors import InputError
    from instep.models import resolve
    from instep.rendering.tokenizer import load_tokenizer

    engines.choose("mlx")
    if to not in ("mlx", "hf"):
        raise InputError(f"--to {to!r}: expected mlx or hf")
    if mode not in ("affine", "mxfp4", "nvfp4"):
        raise InputError(f"--mode {mode!r}: expected affine, mxfp4 or nvfp4")
    if output.exists():
        raise InputError(f"{output} exists already: give -o a folder that does not")
    quantize = bits is not None or recipe is not None or mode != "affine"
    if to == "hf" and (quantize or group_size):
        raise InputError("--to hf writes float weights: leave out --bits, --group-size, --mode and --recipe")
    if group_size and not quantize:
        raise InputError("--group-size is for quantized weights: give --bits too")

    conversion = engines.part("mlx", "convert")
    source = resolve(model, revision)
    probe = load_tokenizer(source)(PROBE, return_tensors="np")["input_ids"][0].astype("int32")
    if to == "hf":
        done = conversion.to_hugging_face(source, output, probe)
    else:
        default = {"affine": 64, "mxfp4": 32, "nvfp4": 16}[mode]
        chosen = conversion.Quantization(bits or 4, group_size or default, mode, recipe) if quantize else None
        done = conversion.to_mlx(source, output, chosen, probe)
    if as_json:
        emit_json(
            {
                "folder": str(done.folder),
                "bytes": done.bytes,
                "bits_per_weight": done.bits_per_weight,
                "kl_nats_per_token": done.divergence,
                "tokens": done.tokens,
            }
        )
        return
    print(f"{done.folder}: {done.bytes / 1e6:.0f} MB, {done.bits_per_weight:.2f} bits a weight")
    print(f"KL against the original: {done.divergence:.4f} nats a token over {done.tokens} tokens")
