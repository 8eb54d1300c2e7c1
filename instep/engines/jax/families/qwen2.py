"""Qwen2 and Qwen2.5: Llama's form with biases on queries, keys and values, and windows in the upper layers."""

from __future__ import annotations

from dataclasses import replace

from instep.engines.jax.architecture import Architecture, ConfigReader, Kind, kinds_of
from instep.engines.jax.families import llama


def architecture(config: ConfigReader) -> Architecture:
    made = llama.architecture(config)
    rope = made.kinds[0].rope
    kinds, kind_of_layer = kinds_of([Kind(rope, window) for window in config.windows(made.layers)])
    return replace(
        made, family="qwen2", kinds=kinds, kind_of_layer=kind_of_layer, qkv_bias=True, o_bias=False
    )
