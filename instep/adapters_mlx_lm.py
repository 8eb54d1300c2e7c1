"""mlx-lm's adapter files ↔ instep's (PEFT) names and shapes. No framework is imported.

mlx-lm keeps `<layer>.lora_a` [in, rank] and `<layer>.lora_b` [rank, out] in `adapters.safetensors`, and adds
scale · (x·lora_a)·lora_b (mlx_lm/tuner/lora.py). So A = lora_aᵀ, B = lora_bᵀ, alpha = scale · rank.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from instep.adapters import CONFIG_FILE, PREFIX, lora_a_name, lora_b_name
from instep.config import AdapterSettings
from instep.errors import InputError
from instep.files import replacing_folder

WEIGHTS_FILE = "adapters.safetensors"


def is_mlx_lm(folder: Path) -> bool:
    return (folder / WEIGHTS_FILE).is_file() and (folder / CONFIG_FILE).is_file()


def read(folder: Path) -> tuple[dict[str, np.ndarray], AdapterSettings, str]:
    """Canonical names → float32 arrays, the settings, and the base model's name as it is written there.

    Raises InputError for what cannot be mapped: DoRA, full fine-tuning, adapted embeddings or experts, layers of
    other shapes.
    """
    config = _config(folder / CONFIG_FILE)
    kind = config.get("fine_tune_type", "lora")
    if kind != "lora":
        raise InputError(f"{folder / CONFIG_FILE}: fine_tune_type is {kind!r}, expected 'lora'")
    given = config.get("lora_parameters")
    if not isinstance(given, dict) or not isinstance(given.get("scale"), int | float):
        raise InputError(f"{folder / CONFIG_FILE}: lora_parameters with rank and scale is missing")
    try:
        arrays = load_file(folder / WEIGHTS_FILE)
    except (OSError, SafetensorError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{folder / WEIGHTS_FILE} cannot be read as float32 or float16 matrices: {error}"
        ) from error
    matrices: dict[str, np.ndarray] = {}
    for name, value in arrays.items():
        stem, _, last = name.rpartition(".")
        module = stem.removeprefix("language_model.")
        if last not in ("lora_a", "lora_b") or value.ndim != 2 or module.endswith("embed_tokens"):
            raise InputError(
                f"{folder / WEIGHTS_FILE}: {name} {list(value.shape)} is no LoRA matrix of a linear layer: it cannot "
                "be mapped to PEFT"
            )
        target = lora_a_name(module) if last == "lora_a" else lora_b_name(module)
        matrices[target] = np.ascontiguousarray(value.T, np.float32)
    return matrices, _settings(folder, matrices, float(given["scale"])), str(config.get("model") or "")


def _config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise InputError(f"{path}: expected a JSON object")
    return config


def _settings(folder: Path, matrices: Mapping[str, np.ndarray], scale: float) -> AdapterSettings:
    modules = _modules(matrices)
    if not modules:
        raise InputError(f"{folder / WEIGHTS_FILE} holds no matrices")
    ranks = set()
    for module in modules:
        a, b = matrices.get(lora_a_name(module)), matrices.get(lora_b_name(module))
        if a is None or b is None or a.shape[0] != b.shape[1]:
            raise InputError(
                f"{folder / WEIGHTS_FILE}: {module} lacks one of its two matrices, or their ranks differ"
            )
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            raise InputError(f"{folder / WEIGHTS_FILE}: {module} holds values that are not finite")
        ranks.add(a.shape[0])
    if len(ranks) > 1:
        raise InputError(
            f"{folder / WEIGHTS_FILE}: ranks {sorted(ranks)}; instep knows one rank for all layers"
        )
    (rank,) = ranks
    targets = tuple(dict.fromkeys(module.rpartition(".")[2] for module in modules))
    return AdapterSettings(rank=rank, alpha=scale * rank, target_modules=targets)


def _modules(matrices: Mapping[str, np.ndarray]) -> list[str]:
    names = {name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in matrices}
    return sorted(names, key=lambda name: [int(p) if p.isdigit() else p for p in name.split(".")])


def write(
    folder: Path, matrices: Mapping[str, np.ndarray], settings: AdapterSettings, base_model: str
) -> None:
    """Write what `mlx_lm.generate --adapter-path` reads. Raises InputError where the adapter is none that mlx-lm
    can express: it adapts the same layers in every block, or nothing."""
    keys: dict[int, set[str]] = {}
    for module in _modules(matrices):
        parts = module.split(".")
        place = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        if place is None:
            raise InputError(f"{module} lies in no block of layers: mlx-lm's adapters cannot express it")
        keys.setdefault(int(parts[place]), set()).add(".".join(parts[place + 1 :]))
    if sorted(keys) != list(range(len(keys))) or any(names != keys[0] for names in keys.values()):
        raise InputError(
            "the adapter does not change the same layers in every block, which mlx-lm's adapters cannot express"
        )
    config = {
        "model": base_model,
        "fine_tune_type": "lora",
        "num_layers": len(keys),
        "lora_parameters": {
            "rank": settings.rank,
            "scale": settings.alpha / settings.rank,
            "dropout": 0.0,
            "keys": sorted(keys[0]),
        },
    }
    arrays = {}
    for module in _modules(matrices):
        arrays[f"{module}.lora_a"] = np.ascontiguousarray(matrices[lora_a_name(module)].T, np.float32)
        arrays[f"{module}.lora_b"] = np.ascontiguousarray(matrices[lora_b_name(module)].T, np.float32)
    with replacing_folder(folder) as partial:
        save_file(arrays, partial / WEIGHTS_FILE, metadata={"format": "mlx"})
        (partial / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
