"""Hugging Face models → MLX, quantized or not, and back; what was written is loaded again and compared."""

from __future__ import annotations

import contextlib
import io
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import numpy as np

from instep.engines.mlx import loading
from instep.engines.mlx.optimizer import number
from instep.errors import InputError
from instep.files import replacing_folder
from instep.models import read_config

Mode = Literal["affine", "mxfp4", "nvfp4"]
GROUP_SIZES = {"affine": (32, 64, 128), "mxfp4": (32,), "nvfp4": (16,)}
BITS = {"affine": (2, 3, 4, 5, 6, 8), "mxfp4": (4,), "nvfp4": (4,)}
RECIPES = ("mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6")
"""mlx-lm's mixed-bit recipes: more bits for the value and down projections of some layers, and for the head."""
KEPT = ("tokenizer*", "*.jinja", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json")
KEPT_CONFIG = ("generation_config.json",)
SAME = 1e-3
"""Nats a token: an unquantized conversion that is further away than rounding is wrong."""


@dataclass(frozen=True)
class Conversion:
    """What was written. `divergence` is the mean KL(original ‖ converted) of the probe's tokens, in nats."""

    folder: Path
    bytes: int
    bits_per_weight: float
    divergence: float
    tokens: int


@dataclass(frozen=True)
class Quantization:
    bits: int
    group_size: int
    mode: Mode = "affine"
    recipe: str | None = None

    def check(self) -> None:
        """Raises InputError where MLX has no such form."""
        if self.recipe is not None and (self.recipe not in RECIPES or self.mode != "affine"):
            raise InputError(f"recipe {self.recipe!r}: expected {', '.join(RECIPES)}, with mode affine")
        for name, value, known in (
            ("bits", self.bits, BITS[self.mode]),
            ("group size", self.group_size, GROUP_SIZES[self.mode]),
        ):
            if value not in known:
                raise InputError(
                    f"{name} {value} with mode {self.mode}: expected {', '.join(map(str, known))}"
                )


def to_mlx(source: Path, target: Path, quantization: Quantization | None, probe: np.ndarray) -> Conversion:
    """Write the model in `source` as mlx-lm reads it. `probe` int32 [T]: tokens that both are compared on.

    Raises InputError where the model is none that mlx-lm knows, is quantized already, or does not come out right.
    """
    from mlx_lm.utils import quantize_model, save_config, save_model

    config = read_config(str(source))
    if "quantization" in config and quantization is not None:
        raise InputError(f"{source} is quantized already: give the float model")
    loading.choose_device("auto")
    model, settings = _load(source, config)
    before = _log_probabilities(model, probe)
    config = config | settings
    if quantization is not None:
        quantization.check()
        predicate: Any = None
        if quantization.recipe is not None:
            from mlx_lm.convert import mixed_quant_predicate_builder

            predicate = mixed_quant_predicate_builder(quantization.recipe, model, quantization.group_size)
        with contextlib.redirect_stdout(io.StringIO()):
            model, config = quantize_model(
                model,
                config,
                quantization.group_size,
                quantization.bits,
                mode=quantization.mode,
                quant_predicate=predicate,
            )
    return _write(source, target, model, config, before, probe, quantization is None, save_model, save_config)


def to_hugging_face(source: Path, target: Path, probe: np.ndarray) -> Conversion:
    """Write an MLX model as float safetensors under Hugging Face names. Raises InputError (see `to_mlx`)."""
    from mlx_lm.utils import dequantize_model, save_config, save_model

    config = read_config(str(source))
    if config.get("model_type") not in loading.TESTED:
        raise InputError(
            f"{config.get('model_type')}: whether mlx-lm keeps the Hugging Face names of this family was not verified; "
            f"expected one of {', '.join(loading.TESTED)}"
        )
    loading.choose_device("auto")
    model, _ = _load(source, config)
    before = _log_probabilities(model, probe)
    if "quantization" in config:
        model = dequantize_model(model)
        config = {key: value for key, value in config.items() if not key.startswith("quantization")}
    return _write(source, target, model, config, before, probe, True, save_model, save_config)


def _load(folder: Path, config: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    from mlx_lm.utils import load_model

    settings = loading.mlx_lm_settings(config)
    try:
        model, _ = load_model(folder, lazy=True, model_config=settings)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError, RuntimeError) as error:
        line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(f"{folder} is not a model that mlx-lm can load: {line}") from error
    return model, settings


def _log_probabilities(model: Any, probe: np.ndarray) -> mx.array:
    """float32 [T, V] under the model in its own precision."""
    logits = model(mx.array(probe[None]))[0].astype(mx.float32)
    found = logits - mx.logsumexp(logits, -1, keepdims=True)
    mx.eval(found)
    return found


def _write(
    source: Path,
    target: Path,
    model: Any,
    config: dict[str, Any],
    before: mx.array,
    probe: np.ndarray,
    exact: bool,
    save_model: Any,
    save_config: Any,
) -> Conversion:
    from mlx_lm.utils import compute_bits_per_weight

    with replacing_folder(target) as partial:
        save_model(partial, model, donate_model=False)
        save_config(dict(config), partial / "config.json")
        for pattern in (*KEPT, *KEPT_CONFIG):
            for file in source.glob(pattern):
                if file.is_file():
                    shutil.copyfile(file, partial / file.name)
        again, _ = _load(partial, read_config(str(partial)))
        after = _log_probabilities(again, probe)
        divergence = number(mx.mean(mx.sum(mx.exp(before) * (before - after), -1)))
        if not np.isfinite(divergence) or (exact and divergence > SAME):
            raise InputError(
                f"the converted model is {divergence:.2e} nats a token from {source}, which is more than rounding: "
                "nothing was written"
            )
        size = sum(file.stat().st_size for file in partial.iterdir())
    return Conversion(target, size, compute_bits_per_weight(again), divergence, len(probe))
