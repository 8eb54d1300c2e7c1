"""Qwen3 (dense): Llama's form with normed queries and keys."""

from __future__ import annotations

from dataclasses import replace

from instep.engines.jax.architecture import Architecture, ConfigReader, Kind, kinds_of
from instep.engines.jax.families import llama

HEAD_DIM = 128
"""Where config.json names none."""


def architecture(config: ConfigReader) -> Architecture:
    made = llama.architecture(ConfigReader({"head_dim": HEAD_DIM, **config.raw}, config.path))
    rope = made.kinds[0].rope
    kinds, kind_of_layer = kinds_of([Kind(rope, window) for window in config.windows(made.layers)])
    return replace(made, family="qwen3", kinds=kinds, kind_of_layer=kind_of_layer, qk_norm=True)
