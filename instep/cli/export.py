"""`instep export`: a run or model for other programs: GGUF, Ollama, or a Hugging Face folder."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from instep.cli.output import emit_json

FORMATS = ("gguf", "ollama", "hf")


def export(
    target: str = typer.Argument(
        ..., metavar="RUN|MODEL", help="Run, adapter folder, model folder or Hub id."
    ),
    to: str = typer.Option(..., "--to", help="gguf, ollama or hf."),
    output: Path = typer.Option(..., "-o", "--output", help="File (gguf) or folder (ollama, hf) to write."),
    model: str | None = typer.Option(None, "--model", help="Base model; default: the one it was trained on."),
    precision: str = typer.Option("f16", "--precision", help="gguf, ollama: f16 or f32."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
) -> None:
    """Write a model, its adapter fused, in the form that another program reads."""
    from instep.errors import InputError
    from instep.publishing.gguf_model import PRECISIONS

    if to not in FORMATS:
        raise InputError(f"--to {to}: expected one of {', '.join(FORMATS)}")
    if precision not in PRECISIONS:
        raise InputError(f"--precision {precision}: expected {' or '.join(PRECISIONS)}")
    if to == "hf":
        from instep.cli.fuse import fuse_into, trained_adapter

        result = fuse_into(trained_adapter(target, model), output, "auto", False, "auto")
    else:
        result = _gguf(target, model, output, precision, ollama=to == "ollama")
    if as_json:
        emit_json(result)
        return
    for name in ("file", "modelfile", "folder"):
        if name in result:
            typer.echo(f"{name}: {result[name]}")
    if to == "ollama":
        typer.echo(f"next: ollama create {output.name} -f {result['modelfile']}")


def _gguf(target: str, model: str | None, output: Path, precision: str, ollama: bool) -> dict[str, Any]:
    from instep import models
    from instep.chat.model import generation_settings
    from instep.errors import InputError
    from instep.files import refuse_output, write_atomically
    from instep.loops.prompts import prompt_renderer
    from instep.publishing.fuse import refuse_filled
    from instep.publishing.gguf_model import architecture_of, write_gguf
    from instep.publishing.gguf_tokenizer import read_tokenizer
    from instep.publishing.modelfile import write_modelfile

    file = output / "model.gguf" if ollama else output
    if ollama:
        refuse_filled(output)
    else:
        refuse_output(output, "-o", force=False)
        if output.suffix != ".gguf":
            raise InputError(f"-o {output}: expected a file name that ends in .gguf")
    settings = generation_settings(target, {"model.path": model})
    base = models.resolve(settings.model.path, settings.model.revision)
    config = models.read_config(str(base))
    architecture_of(config)
    renderer = prompt_renderer(base)
    modelfile = None
    if ollama:  # before the weights: a template that has no such form is refused at once
        words = read_tokenizer(renderer.tokenizer, base, config["vocab_size"])
        modelfile = write_modelfile(file.name, renderer, words.adds_bos)
    with _whole(base, settings.adapter, output.absolute().parent) as folder:
        size = write_gguf(folder, file, renderer.tokenizer, precision, output.stem)
    result = {"file": str(file), "bytes": size, "precision": precision, "adapter": settings.adapter}
    if modelfile is not None:
        write_atomically(output / "Modelfile", modelfile)
        result["modelfile"] = str(output / "Modelfile")
    return result


@contextmanager
def _whole(base: Path, adapter: str | None, beside: Path) -> Iterator[Path]:
    """A folder with the whole model: the base, or a float32 fusion that is removed again."""
    from instep.loops.run import adapter_folder
    from instep.publishing.fuse import fuse

    if adapter is None:
        yield base
        return
    beside.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=beside, prefix=".fused-") as temporary:
        folder = Path(temporary) / "model"
        fuse(base, adapter_folder(adapter), folder, "float32")
        yield folder
