"""LoRA into the base's weights: a Hugging Face folder that needs no adapter. numpy only, shard by shard.

W + (alpha / rank)·B·A is computed in float32 and rounded to the type that is stored. Rounding can erase a small
difference (a 16-bit weight moves in steps), so what survives of it is measured.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np

from instep import models
from instep.adapters import PREFIX, load_adapter, lora_a_name, lora_b_name
from instep.errors import InputError
from instep.files import replacing_folder
from instep.publishing.tensors import (
    FLOATS,
    TYPES,
    Entry,
    TensorFile,
    as_float32,
    from_float32,
    write_tensors,
)
from instep.rendering.tokenizer import write_lent_template

ENOUGH = 0.9
"""Share of the adapter that has to survive the rounding."""
NOT_COPIED = ("README.md", "*.safetensors", "*.safetensors.index.json")
"""The base's model card describes another model."""


@dataclass(frozen=True)
class FuseReport:
    """What was fused. With d the adapter's difference and d' what is left of it after rounding, over all layers:
    `survived` is <d', d> / <d, d>, `cosine` the cosine between the two."""

    layers: int
    precision: str
    survived: float
    cosine: float
    bytes: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class _Tally:
    dot: float = 0.0
    wanted: float = 0.0
    left: float = 0.0

    def add(self, wanted: np.ndarray, left: np.ndarray) -> None:
        self.dot += float(np.vdot(wanted, left))
        self.wanted += float(np.vdot(wanted, wanted))
        self.left += float(np.vdot(left, left))

    @property
    def survived(self) -> float:
        return self.dot / self.wanted

    @property
    def cosine(self) -> float:
        return self.dot / math.sqrt(self.wanted * self.left) if self.left else 0.0


def fuse(
    base: Path, adapter: Path, target: Path, precision: str = "auto", allow_loss: bool = False
) -> FuseReport:
    """Write the fused model to the folder `target`, which must not exist or be empty; whole or not at all.

    precision   "auto" keeps each tensor's type, else float32, bfloat16 or float16 for all
    allow_loss  write it even where less than ENOUGH of the adapter survives the rounding
    Raises InputError for an adapter of another model, an adapter that adds nothing, a base that is stored
    quantized, a sum that is not finite in the type that is stored, and where too little survives.
    """
    refuse_filled(target)
    config = models.read_config(str(base))
    if "quantization_config" in config or "quantization" in config:
        raise InputError(
            f"model {base} is stored quantized: an adapter can only be fused into 16- or 32-bit weights; give the "
            "original model with --model"
        )
    matrices, settings = load_adapter(adapter)
    modules = [
        name.removeprefix(PREFIX).removesuffix(".lora_A.weight") for name in matrices if ".lora_A." in name
    ]
    files = [TensorFile(path) for path in sorted(base.glob("*.safetensors"))]
    names = {name for file in files for name in file.entries}
    modules_of = {weight_of(module, names): module for module in modules}
    tally = _Tally()
    size = 0
    with replacing_folder(target) as partial:
        for file in files:
            size += _fuse_file(
                file, partial, modules_of, matrices, settings.alpha / settings.rank, precision, tally
            )
        if not tally.wanted:
            raise InputError(
                f"adapter {adapter} adds nothing to the model (its B matrices are zero): train it first"
            )
        if tally.survived < ENOUGH and not allow_loss:
            raise InputError(
                f"only {tally.survived:.0%} of the adapter would survive rounding to "
                f"{_stored(files, modules_of, precision)}: fuse with --precision float32, or accept it (--allow-loss)"
            )
        _copy_rest(base, partial, config, precision, size)
    return FuseReport(len(modules), _stored(files, modules_of, precision), tally.survived, tally.cosine, size)


def refuse_filled(target: Path) -> None:
    """Raises InputError where there is something in the way: nothing is overwritten."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError(f"{target} already exists and is not empty: give -o another name, or move it away")


def weight_of(module: str, names: Collection[str]) -> str:
    """The name in the files of a module's weight. Raises InputError where there is none.

    Files may lack the leading `model.` of the loaded model, or have another prefix before it.
    """
    name = f"{module}.weight"
    bare = name.removeprefix("model.")
    if name in names:
        return name
    found = [one for one in names if one == bare or one.endswith(f".{bare}")]
    if len(found) != 1:
        raise InputError(
            f"the adapter's layer {module} is not in the model's files: it belongs to another model (give the "
            "right one with --model)"
        )
    return found[0]


def _fuse_file(
    file: TensorFile,
    folder: Path,
    modules: Mapping[str, str],
    matrices: Mapping[str, np.ndarray],
    scale: float,
    precision: str,
    tally: _Tally,
) -> int:
    entries = [_stored_entry(entry, precision) for entry in file.entries.values()]

    def content(entry: Entry) -> np.ndarray:
        module = modules.get(entry.name)
        if module is None:
            same = entry.dtype == file.entries[entry.name].dtype
            return file.raw(entry.name) if same else _rounded(file.float32(entry.name), entry)
        if entry.dtype not in FLOATS:
            raise InputError(
                f"{file.path}: {entry.name} is stored as {entry.dtype}: expected 16- or 32-bit floats"
            )
        a, b = matrices[lora_a_name(module)], matrices[lora_b_name(module)]
        if entry.shape != (b.shape[0], a.shape[1]):
            raise InputError(
                f"{entry.name} has shape {list(entry.shape)}, but the adapter's layer is {[b.shape[0], a.shape[1]]}: "
                "it belongs to another model (give the right one with --model)"
            )
        base = file.float32(entry.name)
        wanted = np.float32(scale) * (b @ a)
        data = _rounded(base + wanted, entry)
        left = _read_back(data, entry) - base
        tally.add(wanted, left)
        return data

    return write_tensors(folder / file.path.name, entries, content, file.metadata or {"format": "pt"})


def _stored_entry(entry: Entry, precision: str) -> Entry:
    if precision == "auto" or entry.dtype not in FLOATS:
        return entry
    return replace(entry, dtype=TYPES[precision])


def _rounded(values: np.ndarray, entry: Entry) -> np.ndarray:
    data = from_float32(values, entry.dtype)
    if not np.isfinite(_read_back(data, entry)).all():
        raise InputError(
            f"{entry.name} would hold values that are not finite in {entry.dtype}: fuse with --precision float32"
        )
    return data


def _read_back(data: np.ndarray, entry: Entry) -> np.ndarray:
    return as_float32(data, entry.dtype).reshape(entry.shape)


def _stored(files: Iterable[TensorFile], fused: Collection[str], precision: str) -> str:
    """What the fused tensors are stored as, for people."""
    if precision != "auto":
        return precision
    by_type = {value: key for key, value in TYPES.items()}
    types = {file.entries[name].dtype for file in files for name in fused if name in file.entries}
    return " and ".join(sorted(by_type.get(one, one) for one in types))


def _copy_rest(base: Path, folder: Path, config: dict[str, Any], precision: str, size: int) -> None:
    """Tokenizer, generation settings, licence; config.json with the type that is stored."""
    for file in sorted(base.iterdir()):
        wanted = any(fnmatch(file.name, pattern) for pattern in models.ALLOW_PATTERNS)
        if file.is_file() and wanted and not any(fnmatch(file.name, one) for one in NOT_COPIED):
            shutil.copyfile(file, folder / file.name)
    write_lent_template(base, folder)
    if precision != "auto":
        config = {name: value for name, value in config.items() if name != "torch_dtype"} | {
            "dtype": precision
        }
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    index = base / "model.safetensors.index.json"
    if index.is_file():
        value = json.loads(index.read_text(encoding="utf-8"))
        value.setdefault("metadata", {})["total_size"] = size
        (folder / index.name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
