"""MLX engines for tests, beside torch engines of the same state."""

from __future__ import annotations

import numpy as np
from batches import PHI3
from batches import engine as torch_engine

from instep.config import AdapterSettings, ModelSettings, OptimizerSettings
from instep.engines.mlx.engine import MlxEngine

__all__ = ["engine", "gradient", "pair", "torch_gradient"]


def engine(folder, seed: int = 0, warm: bool = True, **model) -> MlxEngine:
    """A float32 LoRA engine; `warm` gives B random values, so that A has a gradient too."""
    settings = {"path": str(folder), "precision": "float32", "device": "cpu", "head_chunk": 7} | model
    targets = PHI3 if folder.name == "phi3" else AdapterSettings().target_modules
    made = MlxEngine()
    made.load(
        ModelSettings(**settings),
        AdapterSettings(rank=4, alpha=8.0, target_modules=targets),
        OptimizerSettings(weight_decay=0.01),
        seed,
    )
    if warm:
        rng = np.random.default_rng(1)
        state = made.state()
        for name, value in state.parameters.items():
            if "lora_B" in name:
                value[...] = 0.1 * rng.standard_normal(value.shape)
        made.load_state(state)
    return made


def pair(folder, **model):
    """(torch engine, MLX engine) that hold the same state."""
    theirs, ours = torch_engine(folder), engine(folder, warm=False, **model)
    ours.load_state(theirs.state())
    return theirs, ours


def gradient(made: MlxEngine) -> np.ndarray:
    """The gradient gathered so far, flat, in the order of the names; then zeroed."""
    named = dict(zip(made._shapes, made._gradient, strict=True))
    flat = np.concatenate([np.array(named[name]).ravel() for name in sorted(named)])
    made.zero_gradient()
    return flat


def torch_gradient(made) -> np.ndarray:
    trainables = made._trainables
    parts = [trainables.view(trainables.gradient, name).numpy().ravel() for name in sorted(trainables.shapes)]
    flat = np.concatenate(parts)
    made.zero_gradient()
    return flat
