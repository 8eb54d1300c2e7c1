"""Gradient checkpointing of single layers, that can be undone and is right with carried keys and values."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from instep.engines.mlx.caches import Prefix
from instep.engines.mlx.lora import LoraLinear


def checkpoint_layer(layer: nn.Module) -> None:
    """Make this layer keep its inputs only and run again in the backward pass. Other layers of its class stay.

    `mx.checkpoint` gives no gradient to arrays that are closed over: adapters and a prefix's keys and values are
    passed as arguments. (mlx-lm's `grad_checkpoint` patches the class for the whole process, and with a cache
    that carries traced arrays its gradient is wrong.)
    """
    adapted = [module for _, module in layer.named_modules() if isinstance(module, LoraLinear)]
    original = type(layer)

    def call(self: Any, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        cache = next((v for v in (*args, *kwargs.values()) if isinstance(v, Prefix)), None)
        outer = [(module.lora_a, module.lora_b) for module in adapted]
        # The layer runs again in the backward pass, when the cache has moved on: its state is noted here.
        frozen = None if cache is None else cache.like(None, None)

        def inner(matrices: Any, x: mx.array, carried: Any) -> Any:
            for module, (a, b) in zip(adapted, matrices, strict=True):
                module.lora_a, module.lora_b = a, b
            try:
                if frozen is None:
                    return original.__call__(self, x, *args, **kwargs), []  # type: ignore[operator]
                twin = frozen.like(*(carried or (None, None)))

                def swap(value: Any) -> Any:
                    return twin if value is cache else value

                out = original.__call__(  # type: ignore[operator]
                    self, x, *map(swap, args), **{key: swap(value) for key, value in kwargs.items()}
                )
                return out, [] if twin.forked else [twin.keys, twin.values]
            finally:
                for module, (a, b) in zip(adapted, outer, strict=True):
                    module.lora_a, module.lora_b = a, b

        carried = [] if cache is None or not cache.forked else [cache.keys, cache.values]
        out, recorded = mx.checkpoint(inner)([list(pair) for pair in outer], x, carried)
        if recorded and cache is not None:
            cache.keys, cache.values = recorded
        return out

    layer.__class__ = type(f"Checkpointed{original.__name__}", (original,), {"__call__": call})


def restore_layer(layer: nn.Module) -> None:
    """Undo `checkpoint_layer`."""
    layer.__class__ = type(layer).__mro__[1]
