"""Which of the ways to compute attention a device takes, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from instep.engines.jax import splash
from instep.engines.jax.attention import Kernel

BLOCKS = "blocks of plain products, recomputed backwards"


def choose_kernel(device: Any, dtype: Any, head_dim: int, devices: int = 1) -> tuple[Kernel, str]:
    """What attention is computed with, and the reason: the device's flash kernel where a trial of it runs.

    `devices` is how many the mesh has: XLA cannot divide a TPU kernel among them by itself.
    """
    if device.platform not in ("gpu", "tpu"):
        return "plain", f"{BLOCKS}: no flash kernel for {device.platform}"
    kernel: Kernel = "cudnn" if device.platform == "gpu" else "splash"
    if dtype == jnp.float32:
        return "plain", f"{BLOCKS}: {kernel}'s flash kernel does not compute in float32"
    if kernel == "splash" and devices > 1:
        return "plain", f"{BLOCKS}: the splash kernel is used on one device only, and here are {devices}"
    try:
        x = jax.device_put(jnp.ones((1, 2, 128, head_dim), dtype), device)
        jax.block_until_ready(jax.jit(jax.grad(_trials()[kernel]))(x))
    except (RuntimeError, ValueError, NotImplementedError, TypeError) as error:
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return "plain", f"{BLOCKS}: {kernel}'s flash kernel does not run here ({line[:100]})"
    return kernel, f"{kernel}'s flash kernel runs on this {device.platform}"


def _trials() -> dict[str, Callable[[jax.Array], jax.Array]]:
    """A scalar function of x [R, H, L, d] that calls each kernel."""

    def cudnn(x: jax.Array) -> jax.Array:
        x = x.swapaxes(1, 2)
        return jax.nn.dot_product_attention(x, x, x, is_causal=True, implementation="cudnn").sum()

    def tpu(x: jax.Array) -> jax.Array:
        return splash.attend(x, x, x, None, None, jnp.int32(0), None, 1.0).astype(jnp.float32).sum()

    return {"cudnn": cudnn, "splash": tpu}
