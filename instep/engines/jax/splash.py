"""Splash attention, JAX's flash kernel for TPUs: causal attention, windows and segments as static masks of blocks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

LANES = 128
"""Rows and prefixes must have a multiple of so many places: a TPU's vector lanes."""
BLOCKS = (512, 256, 128)


def suits(length: int, prefix: int, packed: bool, window: int | None) -> bool:
    """Whether the kernel can say who sees whom: how far a row's window reaches into a prefix is not static, and
    its segments cannot hide other segments of the row and show all of the prefix."""
    return length % LANES == 0 and prefix % LANES == 0 and not (prefix and (packed or window is not None))


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    prefix: tuple[jax.Array, jax.Array] | None,
    segment: jax.Array | None,
    prefix_length: jax.Array,
    window: int | None,
    scale: float,
    interpret: bool = False,
) -> jax.Array:
    """q [R, H, L, d], k and v [R, H_kv, L, d], prefix (k, v) [H_kv, P, d] → [R, H, L, d].

    `segment` int32 [R, L] where rows are packed or behind a prefix, whose places from `prefix_length` on are not
    seen. `interpret` runs the kernel's own program on any device, for tests.
    """
    # Here, because only TPUs use it and Pallas is slow to import.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    rows, heads, length, _ = q.shape
    places = 0
    own = segment
    if prefix is not None:
        assert segment is not None
        places = prefix[0].shape[1]
        k, v = (
            jnp.concatenate([jnp.broadcast_to(shared, (rows, *shared.shape)), mine], 2)
            for shared, mine in zip(prefix, (k, v), strict=True)
        )
        real = (jnp.arange(places) < prefix_length).astype(segment.dtype)
        own = jnp.concatenate([jnp.broadcast_to(real, (rows, places)), segment], 1)
    shape = (length, places + length)
    mask = (
        masks.CausalMask(shape, offset=places)  # a row sees the whole prefix
        if window is None
        else masks.LocalMask(shape, (window - 1, 0), offset=0)
    )
    attention: Any = kernel.make_splash_mha(
        masks.MultiHeadMask([mask] * heads),
        block_sizes=kernel.BlockSizes(**_block_sizes(*shape)),
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name="attention",
        interpret=interpret,
    )
    q = q * jnp.asarray(scale, q.dtype)
    if segment is None or own is None:
        return jax.vmap(attention)(q, k, v)
    return jax.vmap(attention)(q, k, v, kernel.SegmentIds(segment, own))


def _block_sizes(queries: int, keys: int) -> dict[str, Any]:
    q, kv = (next(size for size in BLOCKS if count % size == 0) for count in (queries, keys))
    return {
        **dict.fromkeys(("block_q", "block_q_dkv", "block_q_dq"), q),
        **dict.fromkeys(("block_kv", "block_kv_compute", "block_kv_dkv"), kv),
        **dict.fromkeys(("block_kv_dkv_compute", "block_kv_dq"), kv),
    }
