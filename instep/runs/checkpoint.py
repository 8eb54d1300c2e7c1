"""Checkpoints in canonical names and shapes, so that any engine can go on with any engine's.

A checkpoint is a folder: `state.safetensors` (parameters and both Adam moments, float32, PEFT names),
`config.toml`, and `checkpoint.json` (counters, cursor, data fingerprint, sha256 of the others).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from instep.engines.base import EngineState
from instep.errors import InputError, TrainingError
from instep.files import replacing_folder

STATE, CONFIG, MANIFEST = "state.safetensors", "config.toml", "checkpoint.json"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class Progress:
    """Where a run stands, beside the engine's state."""

    step: int = 0
    """Optimizer steps done, skipped ones included: the data cursor."""
    updates: int = 0
    """Optimizer updates that were applied."""
    seed: int = 0
    data_fingerprint: str = ""
    training_seconds: float = 0.0
    supervised_tokens: int = 0
    skipped_steps: int = 0
    best_step: int | None = None
    best_validation_loss: float | None = None
    best_reward: float | None = None
    """RL: mean held-out reward of `checkpoints/best`."""
    task_cursor: int = 0
    """RL: where the stream of tasks stands."""
    rollouts: int = 0
    """RL: completions sampled so far."""
    evaluated_step: int = -1
    """The step after which the held-out split was last evaluated."""
    first_validation: dict[str, float] | None = None
    """Held-out loss and accuracy before the first step."""
    last_validation: dict[str, float] | None = None


def save_checkpoint(folder: Path, state: EngineState, progress: Progress, config: str) -> None:
    """Write a checkpoint whole or not at all.

    Raises TrainingError where a value is not finite, InputError where the disk refuses.
    """
    tensors: dict[str, np.ndarray] = {}
    for kind in ("parameters", "exp_avg", "exp_avg_sq"):
        for name, value in getattr(state, kind).items():
            if not np.isfinite(value).all():
                raise TrainingError(
                    f"{kind} of {name} holds non-finite values: the checkpoint was not written"
                )
            tensors[f"{kind}/{name}"] = np.ascontiguousarray(value, np.float32)
    with replacing_folder(folder) as partial:
        save_file(tensors, partial / STATE)
        (partial / CONFIG).write_text(config, encoding="utf-8")
        manifest: dict[str, Any] = {
            "format": FORMAT_VERSION,
            "optimizer_step": state.step,
            "progress": asdict(progress),
            "sha256": {name: _sha256(partial / name) for name in (STATE, CONFIG)},
        }
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=2, allow_nan=False), encoding="utf-8")


def load_checkpoint(folder: Path) -> tuple[EngineState, Progress]:
    """Raises InputError where the checkpoint is missing, damaged or of a later version."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] > FORMAT_VERSION:
            raise InputError(f"checkpoint {folder} was written by a later instep: upgrade to read it")
        for name, expected in manifest["sha256"].items():
            if _sha256(folder / name) != expected:
                raise InputError(f"checkpoint {folder} is damaged: {name} is not what was written")
        tensors = load_file(folder / STATE)
        progress = Progress(**manifest["progress"])
        step = int(manifest["optimizer_step"])
        if not isinstance(progress.step, int) or progress.step < 0:
            raise ValueError(f"progress.step is {progress.step!r}, expected a number of steps")
    except FileNotFoundError as error:
        raise InputError(f"no checkpoint in {folder}: {Path(error.filename).name} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise InputError(f"checkpoint {folder} cannot be read: {error}") from None
    parts: dict[str, dict[str, np.ndarray]] = {"parameters": {}, "exp_avg": {}, "exp_avg_sq": {}}
    for key, value in tensors.items():
        kind, _, name = key.partition("/")
        parts[kind][name] = value
    return EngineState(**parts, step=step), progress


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
