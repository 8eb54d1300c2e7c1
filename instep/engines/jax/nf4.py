"""The frozen base in 4 bits: NormalFloat-4 in blocks of 64 (QLoRA, arXiv 2305.14314, appendix E)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

BLOCK = 64
LEVELS = np.array(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    np.float32,
)
"""Quantiles of the normal distribution, scaled to [-1, 1], with an exact zero."""


class Nf4(NamedTuple):
    """Matrices of equal shape, quantized: `codes` uint8 […, blocks, 32], two levels a byte (the first in the low
    half); `absmax` float32 [blocks]. Blocks run over the flattened matrix, its tail padded with zeros."""

    codes: jax.Array
    absmax: jax.Array


@jax.jit
def quantize(matrix: jax.Array) -> Nf4:
    """matrix [out, in] → its nearest levels; 4.5 bits a weight."""
    flat = matrix.astype(jnp.float32).reshape(-1)
    blocks = jnp.pad(flat, (0, -flat.size % BLOCK)).reshape(-1, BLOCK)
    absmax = jnp.abs(blocks).max(-1)
    scaled = blocks / jnp.where(absmax > 0, absmax, 1.0)[:, None]
    code = jnp.zeros(blocks.shape, jnp.uint8)
    for border in (LEVELS[1:] + LEVELS[:-1]) / 2:
        code += (scaled > border).astype(jnp.uint8)
    return Nf4(code[:, ::2] | (code[:, 1::2] << 4), absmax)


def dequantize(packed: Nf4, shape: tuple[int, int], dtype: jnp.dtype) -> jax.Array:
    """The matrix [out, in] that `packed` stands for."""
    code = jnp.stack([packed.codes & 15, packed.codes >> 4], -1).reshape(-1, BLOCK)
    flat = (jnp.asarray(LEVELS)[code] * packed.absmax[:, None]).reshape(-1)
    return flat[: shape[0] * shape[1]].reshape(shape).astype(dtype)
