"""Adapters: their names, their first values and their one format on disk (PEFT's). No framework is imported.

A canonical name is PEFT's: `base_model.model.<module path in the Hugging Face model>.lora_A.weight`
[rank, in] and `….lora_B.weight` [out, rank], float32.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from instep.config import AdapterSettings
from instep.engines.base import EngineState
from instep.errors import InputError

PREFIX = "base_model.model."
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"


def lora_a_name(module: str) -> str:
    return f"{PREFIX}{module}.lora_A.weight"


def lora_b_name(module: str) -> str:
    return f"{PREFIX}{module}.lora_B.weight"


def initial_adapter(shapes: Mapping[str, tuple[int, int]], seed: int) -> dict[str, np.ndarray]:
    """First values of the A matrices, the same on every engine: canonical name → float32 [rank, in].

    `shapes` maps the canonical name of each A to (rank, in). Kaiming-uniform with a = √5 as in PEFT, which
    is U(−1/√in, 1/√in) (He et al., arXiv 1502.01852: bound = √(6 / ((1 + a²)·in))). Each matrix has its own
    Philox stream, keyed by the seed and by the SHA-256 of its name, so that neither the order of the names nor
    which other layers are adapted matters. B starts at zero, so that the adapted model starts as the base.
    """
    values = {}
    for name, (rank, width) in shapes.items():
        digest = hashlib.sha256(name.encode()).digest()
        key = np.array([seed, int.from_bytes(digest[:8], "little")], np.uint64)
        uniform = np.random.Generator(np.random.Philox(key=key)).random((rank, width))
        values[name] = ((2.0 * uniform - 1.0) / np.sqrt(width)).astype(np.float32)
    return values


def _peft_config(adapter: AdapterSettings, base_model: str) -> dict[str, object]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": adapter.rank,
        "lora_alpha": int(adapter.alpha) if float(adapter.alpha).is_integer() else adapter.alpha,
        "target_modules": list(adapter.target_modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "use_rslora": False,
        "use_dora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "modules_to_save": None,
    }


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def save_adapter(
    folder: str | Path, state: EngineState, adapter: AdapterSettings, base_model: str, replace: bool = False
) -> Path:
    """Write a LoRA adapter as `peft.PeftModel.from_pretrained` reads it. Returns the folder.

    Both files are written and fsynced in a temporary folder beside the target, then renamed into place.
    Raises InputError where a value is not finite, the state is no LoRA adapter, the folder already holds an
    adapter (unless `replace`), or it cannot be written.
    """
    target = Path(folder)
    if adapter.kind != "lora":
        raise InputError(f"adapter.kind is {adapter.kind!r}: only a LoRA adapter has the PEFT form")
    for name, value in state.parameters.items():
        if not name.startswith(PREFIX):
            raise InputError(f"parameter {name} is no LoRA matrix: expected names that begin with {PREFIX}")
        if not np.isfinite(value).all():
            raise InputError(f"adapter matrix {name} holds values that are not finite: nothing was written")
    if (target / WEIGHTS_FILE).exists() and not replace:
        raise InputError(f"{target} already holds an adapter: choose another folder, or move it away")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise InputError(f"cannot write the adapter to {target}: {error.strerror or error}") from error
    try:
        arrays = {name: np.ascontiguousarray(value, np.float32) for name, value in state.parameters.items()}
        save_file(arrays, temporary / WEIGHTS_FILE, metadata={"format": "pt"})
        config = json.dumps(_peft_config(adapter, base_model), indent=2) + "\n"
        (temporary / CONFIG_FILE).write_text(config, encoding="utf-8")
        for name in (WEIGHTS_FILE, CONFIG_FILE):
            (temporary / name).chmod(0o644)
            _fsync(temporary / name)
        target.mkdir(exist_ok=True)
        for name in (WEIGHTS_FILE, CONFIG_FILE):
            (temporary / name).replace(target / name)
        _fsync(target)
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot write the adapter to {target}: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _read_config(path: Path) -> AdapterSettings:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise InputError(f"{path}: expected a PEFT configuration with peft_type LORA")
    for name in (
        "use_rslora",
        "use_dora",
        "rank_pattern",
        "alpha_pattern",
        "modules_to_save",
        "fan_in_fan_out",
    ):
        if config.get(name):
            raise InputError(f"{path}: {name} is set, which instep does not support; expected plain LoRA")
    if config.get("bias", "none") != "none":
        raise InputError(f"{path}: bias is {config['bias']!r}, expected 'none'")
    targets = config.get("target_modules")
    if not isinstance(targets, list):
        raise InputError(f"{path}: target_modules is {targets!r}, expected a list of layer names")
    try:
        return AdapterSettings.model_validate(
            {"rank": config.get("r"), "alpha": config.get("lora_alpha"), "target_modules": tuple(targets)}
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise InputError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def base_model_of(folder: str | Path) -> str:
    """The base model that a PEFT adapter names; empty where it names none. Raises InputError."""
    path = Path(folder) / CONFIG_FILE
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as JSON: {error}") from error
    return str(config.get("base_model_name_or_path") or "")


def load_adapter(folder: str | Path) -> tuple[dict[str, np.ndarray], AdapterSettings]:
    """Read a PEFT LoRA adapter: canonical names → float32 arrays, and its settings.

    Raises InputError where a file is missing, is no plain LoRA, a matrix lacks its partner, a shape does not
    fit the rank, or a value is not finite.
    """
    source = Path(folder)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (source / name).is_file():
            raise InputError(f"{source} is not an adapter: {name} is missing; expected a PEFT adapter folder")
    settings = _read_config(source / CONFIG_FILE)
    try:
        arrays = load_file(source / WEIGHTS_FILE)
    except (OSError, SafetensorError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{source / WEIGHTS_FILE} cannot be read: {error}") from error
    arrays = {name: value.astype(np.float32) for name, value in arrays.items()}
    for name, value in arrays.items():
        stem, _, kind = name.removesuffix(".weight").rpartition(".")
        if not name.startswith(PREFIX) or not name.endswith(".weight") or kind not in ("lora_A", "lora_B"):
            raise InputError(
                f"{source / WEIGHTS_FILE}: unexpected name {name}; expected {PREFIX}<layer>.lora_A.weight or lora_B"
            )
        partner = f"{stem}.{'lora_B' if kind == 'lora_A' else 'lora_A'}.weight"
        if partner not in arrays:
            raise InputError(f"{source / WEIGHTS_FILE}: {name} has no {partner} beside it")
        if value.ndim != 2 or value.shape[0 if kind == "lora_A" else 1] != settings.rank:
            raise InputError(
                f"{source / WEIGHTS_FILE}: {name} has shape {list(value.shape)}: not of rank {settings.rank}"
            )
        if not np.isfinite(value).all():
            raise InputError(f"{source / WEIGHTS_FILE}: {name} holds values that are not finite")
    if not arrays:
        raise InputError(f"{source / WEIGHTS_FILE} holds no matrices")
    return arrays, settings
