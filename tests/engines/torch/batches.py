"""Batches for tests: conversations of random tokens with every second token supervised."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from instep.config import AdapterSettings, ModelSettings, OptimizerSettings
from instep.engines.torch.engine import TorchEngine
from instep.records import Batch

VOCABULARY = 97
PHI3 = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


def samples(lengths: Sequence[int], seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    """(tokens [T], weight [T]) of random conversations."""
    rng = np.random.default_rng(seed)
    out = []
    for length in lengths:
        weight = (rng.random(length) < 0.5).astype(np.float32) * rng.choice([0.5, 1.0, 2.0], length)
        weight[0], weight[-1] = 0.0, 1.0
        out.append((rng.integers(3, VOCABULARY, length).astype(np.int32), weight.astype(np.float32)))
    return out


def batch(
    rows: Sequence[Sequence[tuple[np.ndarray, np.ndarray]]], length: int, pad: int = 0, sites: int = 0
) -> Batch:
    """Rows of packed samples, padded to `length` with the id `pad` and to `sites` sites."""
    tokens = np.full((len(rows), length), pad, np.int32)
    segment, position = np.zeros_like(tokens), np.zeros_like(tokens)
    site, label, weight = [], [], []
    for r, row in enumerate(rows):
        at = 0
        for s, (ids, w) in enumerate(row):
            tokens[r, at : at + len(ids)] = ids
            segment[r, at : at + len(ids)] = s + 1
            position[r, at : at + len(ids)] = np.arange(len(ids))
            for t in np.flatnonzero(w):
                site.append(r * length + at + t - 1)
                label.append(ids[t])
                weight.append(w[t])
            at += len(ids)
    extra = max(0, sites - len(site))
    return Batch(
        tokens,
        segment,
        position,
        np.array(site + [0] * extra, np.int32),
        np.array(label + [0] * extra, np.int32),
        np.array(weight + [0] * extra, np.float32),
    )


def engine(folder, seed: int = 0, warm: bool = True, **model) -> TorchEngine:
    """A float32 LoRA engine; `warm` gives B random values, so that A has a gradient too."""
    settings = {"path": str(folder), "precision": "float32", "device": "cpu", "head_chunk": 7} | model
    targets = PHI3 if folder.name == "phi3" else AdapterSettings().target_modules
    made = TorchEngine()
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


def gradient(made: TorchEngine) -> np.ndarray:
    """The gradient gathered so far, flat; then zeroed."""
    flat = made._trainables.gradient.numpy().copy()
    made.zero_gradient()
    return flat


def relative(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))
