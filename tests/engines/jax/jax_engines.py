"""Engines for tests, and what is read out of them."""

from __future__ import annotations

import numpy as np

from instep.config import AdapterSettings, ModelSettings, OptimizerSettings
from instep.engines.base import Engine
from instep.engines.jax.engine import JaxEngine


def load(made: Engine, folder, seed: int = 0, warm: bool = True, **model) -> Engine:
    """The engine with a float32 LoRA model; `warm` gives B random values, so that A has a gradient too."""
    settings = {"path": str(folder), "precision": "float32", "device": "cpu", "head_chunk": 7} | model
    made.load(
        ModelSettings(**settings),
        AdapterSettings(rank=4, alpha=8.0),
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


def engine(folder, seed: int = 0, warm: bool = True, **model) -> JaxEngine:
    return load(JaxEngine(), folder, seed, warm, **model)  # type: ignore[return-value]


def named_gradient(made: JaxEngine) -> dict[str, np.ndarray]:
    """The gradient gathered so far, by canonical name; then zeroed."""
    arrays = made._names.unstack(made._trained.gradient)
    made.zero_gradient()
    return arrays


def gradient(made: JaxEngine) -> np.ndarray:
    return np.concatenate([value.ravel() for value in named_gradient(made).values()])
