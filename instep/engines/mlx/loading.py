"""Which device, which precision and why; a model of mlx-lm with its settings read as transformers 5 writes them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from instep.config import ModelSettings
from instep.engines.mlx.lora import dequantize_products
from instep.engines.mlx.optimizer import number
from instep.errors import InputError
from instep.models import read_config

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
TESTED = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3")
"""Families whose log-probabilities instep's tests compare with transformers."""
GROUP_SIZE = 64
SLOW_BLAS = 30e9
"""FLOP/s below which a CPU's matrix product cannot be an optimised one."""


def choose_device(wanted: str) -> tuple[mx.Device, str]:
    """The device and the reason for it, made MLX's default. Raises InputError where it is not there."""
    gpu = mx.metal.is_available() or (hasattr(mx, "cuda") and mx.cuda.is_available())
    kind = "Metal" if mx.metal.is_available() else "CUDA"
    if wanted == "gpu" and not gpu:
        raise InputError("device 'gpu' is not on this machine (MLX finds: cpu); set model.device = 'auto'")
    use_gpu = gpu and wanted != "cpu"
    device = mx.Device(mx.gpu if use_gpu else mx.cpu)
    mx.set_default_device(device)
    if wanted != "auto":
        return device, "asked for"
    return device, f"{kind} found" if use_gpu else "MLX finds no GPU"


def is_gpu(device: mx.Device) -> bool:
    return device.type == mx.DeviceType.gpu


def choose_precision(wanted: str, device: mx.Device) -> tuple[mx.Dtype, str]:
    """Data type of the frozen base and of activations, and the reason for it."""
    if wanted != "auto":
        return DTYPES[wanted], "asked for"
    if is_gpu(device):
        return mx.bfloat16, "half the memory of float32, its range and no loss scaling"
    return mx.float32, "MLX has no fast bfloat16 product on a CPU"


def blas_note() -> str | None:
    """What to do where MLX's matrix product on this CPU is a reference one; None where it is not."""
    a = mx.ones((512, 512))
    mx.eval(a @ a)
    began = time.perf_counter()
    mx.eval(a @ a)
    speed = 2 * 512**3 / (time.perf_counter() - began)
    if speed > SLOW_BLAS:
        return None
    found = sorted(str(path) for path in Path("/usr/lib").glob("*/openblas*/libblas.so.3"))
    where = (
        found[0] if found else "<libblas.so.3 of OpenBLAS> after installing it (Debian: libopenblas0-pthread)"
    )
    return (
        f"{speed / 1e9:.0f} GFLOP/s, a reference BLAS, about 50 times too slow: start with LD_PRELOAD={where}"
    )


# --- settings ------------------------------------------------------------------------------------------------


def rope_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary settings that mlx-lm reads (`rope_theta`, `rope_scaling`, …) from transformers 5's `rope_parameters`.

    mlx-lm ignores `rope_parameters` for most families, without a word, and takes its own default base. Gemma 3
    has one entry for each kind of layer.
    """
    given = config.get("rope_parameters")
    if not isinstance(given, Mapping) or not given:
        return {}
    nested = {key: value for key, value in given.items() if isinstance(value, Mapping)}
    if not nested:
        return _flat(given)
    whole, local = nested.get("full_attention"), nested.get("sliding_attention")
    if whole is None or set(nested) - {"full_attention", "sliding_attention"}:
        raise InputError(
            f"rope_parameters has entries for {', '.join(nested)}: the mlx engine knows full_attention and "
            "sliding_attention; use another engine"
        )
    found = _flat(whole)
    if local is not None:
        if _kind(local) != "default":
            raise InputError("rope_parameters of sliding_attention are scaled, which mlx-lm does not know")
        found["rope_local_base_freq"] = float(local["rope_theta"])
    return found


def _kind(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type", rope.get("type", "default")))


def _flat(rope: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"rope_theta": float(rope["rope_theta"])} if "rope_theta" in rope else {}
    if "partial_rotary_factor" in rope:
        found["partial_rotary_factor"] = rope["partial_rotary_factor"]
    rest = {k: v for k, v in rope.items() if k not in ("rope_theta", "partial_rotary_factor")}
    found["rope_scaling"] = None if _kind(rope) == "default" else rest | {"type": _kind(rope)}
    return found


def window_pattern(config: Mapping[str, Any]) -> dict[str, Any]:
    """Gemma 3's `sliding_window_pattern` (every n-th layer is a full one) from `layer_types`."""
    kinds = config.get("layer_types")
    if not kinds or "sliding_window_pattern" in config:
        return {}
    full = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
    every = full[0] + 1 if full else len(kinds) + 1
    if any((kind == "full_attention") != ((i + 1) % every == 0) for i, kind in enumerate(kinds)):
        raise InputError(
            f"layer_types is no pattern of every n-th full layer ({kinds}): mlx-lm cannot run this model"
        )
    return {"sliding_window_pattern": every}


def mlx_lm_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """All that mlx-lm must be told beside a config.json of transformers 5. Raises InputError."""
    pattern = window_pattern(config) if config.get("model_type") == "gemma3_text" else {}
    return rope_settings(config) | pattern


@dataclass(frozen=True)
class Window:
    """What mlx-lm leaves out of a model's sliding windows: `everywhere` is added to every layer's mask; a row
    longer than `longest` tokens would not be computed rightly."""

    everywhere: int | None = None
    longest: int | None = None


def window_of(config: Mapping[str, Any]) -> Window:
    """mlx-lm remaps mistral to llama and runs phi3 and gemma2 without their windows."""
    width, kind = config.get("sliding_window"), config.get("model_type")
    if not width or kind == "gemma3_text":
        return Window()
    if kind in ("mistral", "phi3"):
        return Window(everywhere=int(width))
    if kind == "gemma2":
        return Window(longest=int(width))
    if kind in ("qwen2", "qwen3"):
        return Window(longest=int(width)) if config.get("use_sliding_window") else Window()
    return Window()


# --- loading -------------------------------------------------------------------------------------------------


@dataclass
class Loaded:
    model: Any
    vocabulary: int
    window: Window
    choices: dict[str, str]


def load_model(settings: ModelSettings, dtype: mx.Dtype, gpu: bool) -> Loaded:
    """A text model of mlx-lm from the local folder, in `dtype`, quantized as stored or as asked for.

    Raises InputError where the folder is no model that mlx-lm knows, or its weights do not fit it.
    """
    from mlx_lm.utils import load_model as load

    folder = Path(settings.path).expanduser()
    config = _config(folder)
    mapped = mlx_lm_settings(config)
    try:
        model, _ = load(folder, lazy=True, model_config=mapped)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError, RuntimeError) as error:
        line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(f"{settings.path} is not a model that the mlx engine can run: {line}") from error
    choices = {}
    if config["model_type"] not in TESTED:
        choices["family"] = f"{config['model_type']}: instep has not compared it with transformers"
    model.set_dtype(dtype)
    choices["quantization"] = _quantize(model, config, settings, gpu)
    _exact_embedding_scale(model, config, dtype)
    mx.eval(model.parameters())
    model.freeze()
    return Loaded(model, _vocabulary(model), window_of(config), choices)


def _vocabulary(model: Any) -> int:
    """Rows of the token embedding, quantized or not."""
    kinds = (nn.Embedding, nn.QuantizedEmbedding)
    return int(next(m for m in model.modules() if isinstance(m, kinds)).weight.shape[0])


def _config(folder: Path) -> dict[str, Any]:
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder} is not a model: expected a folder with config.json and *.safetensors")
    config = read_config(str(folder))
    if "model_type" not in config:
        raise InputError(
            f"{folder / 'config.json'} names no model_type: expected the config.json of a Hugging Face model"
        )
    if not list(folder.glob("model*.safetensors")):
        raise InputError(f"{folder} has no model*.safetensors: convert the weights to safetensors")
    return config


def _quantize(model: Any, config: Mapping[str, Any], settings: ModelSettings, gpu: bool) -> str:
    stored = config.get("quantization")
    asked = settings.quantization
    if stored and asked != "none" and stored.get("bits") != int(asked[0]):
        raise InputError(
            f"model.quantization is {asked!r}, but {settings.path} is stored with {stored.get('bits')} bits: "
            "leave it at 'none', or give the float model"
        )
    said = f"as stored, {stored.get('bits')} bits" if stored else "none"
    if asked != "none" and not stored:
        predicate = getattr(model, "quant_predicate", None) or (lambda *_: True)

        def chosen(path: str, module: Any) -> Any:
            fits = hasattr(module, "to_quantized") and module.weight.shape[-1] % GROUP_SIZE == 0
            return fits and predicate(path, module)

        nn.quantize(model, GROUP_SIZE, int(asked[0]), class_predicate=chosen)
        said = f"{asked[0]} bits, affine, groups of {GROUP_SIZE}"
    if said != "none" and not gpu:
        count = dequantize_products(model)
        said += f"; {count} products made float as they are needed (mx.quantized_matmul is slow on a CPU)"
    return said


class ScaledEmbedding(nn.Module):
    """An embedding whose rows are multiplied by `factor`; as a head it is not."""

    def __init__(self, base: Any, factor: float) -> None:
        super().__init__()
        self.base, self.factor = base, factor

    def __call__(self, tokens: mx.array) -> mx.array:
        return self.base(tokens) * self.factor

    def as_linear(self, x: mx.array) -> mx.array:
        return self.base.as_linear(x)


def _exact_embedding_scale(model: Any, config: Mapping[str, Any], dtype: mx.Dtype) -> None:
    """mlx-lm rounds Gemma 3's embedding scale √D to bfloat16 whatever the precision, transformers to the
    weights' type: in float32 the two would differ by up to 0.4 %."""
    if config["model_type"] != "gemma3_text" or dtype == mx.bfloat16:
        return
    exact = float(config["hidden_size"]) ** 0.5
    rounded = number(mx.array(exact, mx.bfloat16))
    wanted = number(mx.array(exact, dtype))
    model.model.embed_tokens = ScaledEmbedding(model.model.embed_tokens, wanted / rounded)
