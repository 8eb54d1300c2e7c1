"""Attention of packed rows behind an optional shared prefix: one function, whose work is done by what the device
can do. `plain` is the reference, and what a CPU computes with.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from instep.engines.jax import splash
from instep.engines.jax.architecture import Architecture

Kernel = Literal["plain", "cudnn", "xla", "splash", "interpreted"]
"""The last of the library's (xla) and of splash's (interpreted) run on any device, for tests."""
HIDDEN = -1e30
"""A score that no softmax gives any weight; finite, so that a row of nothing else is no NaN."""
SMALLEST_BLOCK = 256


@dataclass(frozen=True)
class Grid:
    """Static shape of a pass: R rows of L tokens behind a prefix of P places (0: none). `packed` where a row may
    hold several segments."""

    rows: int
    length: int
    prefix: int
    packed: bool

    @property
    def tokens(self) -> int:
        return self.prefix + self.rows * self.length


class Places(NamedTuple):
    """Where tokens stand: segment, position int32 [R, L]; how many of the prefix's places are real, int32 []."""

    segment: jax.Array
    position: jax.Array
    prefix_length: jax.Array


def attend(
    architecture: Architecture,
    kernel: Kernel,
    grid: Grid,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    places: Places,
    kind: jax.Array,
) -> jax.Array:
    """q [N, H, d], k and v [N, H_kv, d] of the prefix and then the rows → [N, H, d].

    A token sees the earlier ones of its segment, and all real ones of the prefix, within the window of `kind`
    (int32 [], index into `architecture.kinds`).
    """
    p, heads, width = grid.prefix, q.shape[1], q.shape[2]
    outputs = []
    prefix = None
    if p:
        alone = Grid(1, p, 0, False)
        none = Places(jnp.zeros((1, p), jnp.int32), jnp.zeros((1, p), jnp.int32), jnp.int32(0))
        pq, pk, pv = (x[:p].swapaxes(0, 1)[None] for x in (q, k, v))
        outputs.append(_grouped(architecture, kernel, alone, pq, pk, pv, None, none, kind)[0].swapaxes(0, 1))
        prefix = (pk[0], pv[0])
    q, k, v = (x[p:].reshape(grid.rows, grid.length, -1, width).swapaxes(1, 2) for x in (q, k, v))
    o = _grouped(architecture, kernel, grid, q, k, v, prefix, places, kind)
    outputs.append(o.swapaxes(1, 2).reshape(-1, heads, width))
    return outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs)


def _grouped(
    architecture: Architecture,
    kernel: Kernel,
    grid: Grid,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    prefix: tuple[jax.Array, jax.Array] | None,
    places: Places,
    kind: jax.Array,
) -> jax.Array:
    """q [R, H, L, d], k, v [R, H_kv, L, d], prefix (k, v) [H_kv, P, d] → [R, H, L, d]."""
    windows = tuple(kind.window for kind in architecture.kinds)
    spec = Spec(grid, windows, architecture.attention_scale)
    if kernel in ("cudnn", "xla"):
        return _library(spec, kernel, q, k, v, prefix, places, kind)
    if kernel in ("splash", "interpreted"):
        return _splash(spec, kernel == "interpreted", q, k, v, prefix, places, kind)
    return _plain_heads(spec, q, k, v, prefix, places, kind)


def _plain_heads(
    spec: Spec,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    prefix: tuple[jax.Array, jax.Array] | None,
    places: Places,
    kind: jax.Array,
) -> jax.Array:
    rows, heads, length, width = q.shape
    q = q.reshape(rows, k.shape[1], -1, length, width)
    output: jax.Array = plain(spec, q, k, v, prefix, places, kind)  # type: ignore[assignment]
    return output.reshape(rows, heads, length, width)


@dataclass(frozen=True)
class Spec:
    """What is static of one call: the grid, the window of each kind of layer, and the factor of the scores."""

    grid: Grid
    windows: tuple[int | None, ...]
    scale: float

    def branches(self) -> tuple[int | None, ...]:
        """Windows that differ in this grid: one that is never reached is none."""
        reach = self.grid.prefix + self.grid.length
        return tuple(None if window is None or window >= reach else window for window in self.windows)


def _by_kind(spec: Spec, function: Any, kind: jax.Array, *operands: Any) -> Any:
    """`function(window, *operands)` with the window of the layer's kind."""
    windows = spec.branches()
    if len(set(windows)) == 1:
        return function(windows[0], *operands)
    return jax.lax.switch(kind, [partial(function, window) for window in windows], *operands)


def _blocks(length: int, window: int | None) -> list[tuple[int, int, int]]:
    """(a, b, low): queries a … b-1, and the first key that one of them may see. The last one is b-1."""
    size = max(SMALLEST_BLOCK, -(-length // 8 // 64) * 64)
    blocks = []
    for a in range(0, length, size):
        low = 0 if window is None else max(0, a - window + 1)
        blocks.append((a, min(a + size, length), low))
    return blocks


def _scores(
    spec: Spec,
    window: int | None,
    block: tuple[int, int, int],
    q: jax.Array,
    k: jax.Array,
    prefix: tuple[jax.Array, jax.Array] | None,
    places: Places,
) -> tuple[jax.Array, jax.Array | None]:
    """Float32 scores of a block of queries [R, H_kv, G, b-a, d]: against own keys [R, H_kv, G, b-a, b-low], and
    against the prefix [R, H_kv, G, b-a, P]; what is not seen is HIDDEN."""
    a, b, low = block
    q = q[:, :, :, a:b] * jnp.asarray(spec.scale, q.dtype)
    rows, heads, groups, count, width = q.shape
    folded = q.reshape(rows, heads, groups * count, width)
    own = jnp.einsum("rhqd,rhkd->rhqk", folded, k[:, :, low:b], preferred_element_type=jnp.float32)
    own = own.reshape(rows, heads, groups, count, b - low)
    i, j = jnp.arange(a, b)[:, None], jnp.arange(low, b)[None]
    seen = i >= j
    if window is not None:
        seen &= i - j < window
    seen = seen[None]
    if spec.grid.packed:
        segment = places.segment
        seen = seen & (segment[:, a:b, None] == segment[:, None, low:b])
    own = jnp.where(seen[:, None, None], own, HIDDEN)
    if prefix is None:
        return own, None
    shared = jnp.einsum("rhqd,hpd->rhqp", folded, prefix[0], preferred_element_type=jnp.float32)
    shared = shared.reshape(rows, heads, groups, count, -1)
    p = jnp.arange(spec.grid.prefix)
    reached = jnp.broadcast_to(p < places.prefix_length, (rows, count, spec.grid.prefix))
    if window is not None:
        reached &= places.position[:, a:b, None] - p < window
    return own, jnp.where(reached[:, None, None], shared, HIDDEN)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def plain(
    spec: Spec,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    prefix: tuple[jax.Array, jax.Array] | None,
    places: Places,
    kind: jax.Array,
) -> jax.Array:
    """q [R, H_kv, G, L, d], k, v [R, H_kv, L, d], prefix (k, v) [H_kv, P, d] → as q.

    Plain products over blocks of queries; the backward pass keeps the output and the log-sum-exp and makes the
    probabilities again (FlashAttention-2, arXiv 2307.08691). The G query heads of one key head are rows of one
    product, so that keys are never repeated, and no row has a copy of the prefix.
    """
    return _forward(spec, q, k, v, prefix, places, kind)[0]


def _mix(weight: jax.Array, values: jax.Array, subscripts: str) -> jax.Array:
    """weight [R, H_kv, G, n, m] times values: the G query heads as rows of one product → [R, H_kv, G, n, d]."""
    rows, heads, groups, count, keys = weight.shape
    folded = weight.reshape(rows, heads, groups * count, keys).astype(values.dtype)
    mixed = jnp.einsum(subscripts, folded, values, preferred_element_type=jnp.float32)
    return mixed.reshape(rows, heads, groups, count, -1)


def _forward(
    spec: Spec,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    prefix: Any,
    places: Places,
    kind: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The output, and the log-sum-exp of every query's scores float32 [R, H_kv, G, L]."""

    def windowed(
        window: int | None, q: jax.Array, k: jax.Array, v: jax.Array, prefix: Any, places: Places
    ) -> tuple[jax.Array, jax.Array]:
        outputs, sums = [], []
        for block in _blocks(spec.grid.length, window):
            own, shared = _scores(spec, window, block, q, k, prefix, places)
            top = own.max(-1, keepdims=True)
            if shared is not None:
                top = jnp.maximum(top, shared.max(-1, keepdims=True))
            own = jnp.exp(own - top)
            total = own.sum(-1, keepdims=True)
            mixed = _mix(own, v[:, :, block[2] : block[1]], "rhqk,rhkd->rhqd")
            if shared is not None:
                shared = jnp.exp(shared - top)
                total += shared.sum(-1, keepdims=True)
                mixed += _mix(shared, prefix[1], "rhqp,hpd->rhqd")
            outputs.append((mixed / total).astype(q.dtype))
            sums.append((top + jnp.log(total))[..., 0])
        return jnp.concatenate(outputs, 3), jnp.concatenate(sums, 3)

    return _by_kind(spec, windowed, kind, q, k, v, prefix, places)


def _keep(
    spec: Spec, q: jax.Array, k: jax.Array, v: jax.Array, prefix: Any, places: Places, kind: jax.Array
) -> tuple[jax.Array, Any]:
    output, total = _forward(spec, q, k, v, prefix, places, kind)
    output, total = checkpoint_name(output, "attention"), checkpoint_name(total, "attention_sum")
    return output, (q, k, v, prefix, places, kind, output, total)


def _backward(spec: Spec, kept: Any, grad: jax.Array) -> tuple[Any, ...]:
    q, k, v, prefix, places, kind, output, total = kept
    # Σ_j p_ij · dp_ij of every query, from the output alone.
    inner = (grad.astype(jnp.float32) * output.astype(jnp.float32)).sum(-1, keepdims=True)

    def windowed(
        window: int | None, q: jax.Array, k: jax.Array, v: jax.Array, prefix: Any
    ) -> tuple[Any, ...]:
        rows, heads, width = q.shape[0], q.shape[1], q.shape[4]
        grad_k, grad_v = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
        grad_prefix = None if prefix is None else tuple(jnp.zeros(x.shape, jnp.float32) for x in prefix)
        grad_q = []
        for block in _blocks(spec.grid.length, window):
            a, b, low = block
            own, shared = _scores(spec, window, block, q, k, prefix, places)
            lse, delta, g = total[:, :, :, a:b, None], inner[:, :, :, a:b], grad[:, :, :, a:b]
            folded_g, folded_q = (x.reshape(rows, heads, -1, width) for x in (g, q[:, :, :, a:b]))

            def pull(
                scores: jax.Array, keys: jax.Array, values: jax.Array, per_row: bool,
                lse: jax.Array = lse, delta: jax.Array = delta, g: jax.Array = g,
                folded_g: jax.Array = folded_g, folded_q: jax.Array = folded_q,
            ) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
                """Gradients of the block's queries, and of its keys and values."""
                m = "rhmd" if per_row else "hmd"
                probability = jnp.exp(scores - lse)
                grad_probability = jnp.einsum(
                    f"rhqd,{m}->rhqm", folded_g, values, preferred_element_type=jnp.float32
                ).reshape(scores.shape)
                grad_scores = probability * (grad_probability - delta)
                fold = (rows, heads, -1, scores.shape[-1])
                probability, grad_scores = (
                    x.astype(q.dtype).reshape(fold) for x in (probability, grad_scores)
                )
                of_q = jnp.einsum(f"rhqm,{m}->rhqd", grad_scores, keys, preferred_element_type=jnp.float32)
                of_k = jnp.einsum(
                    f"rhqm,rhqd->{m}", grad_scores, folded_q, preferred_element_type=jnp.float32
                )
                of_v = jnp.einsum(
                    f"rhqm,rhqd->{m}", probability, folded_g, preferred_element_type=jnp.float32
                )
                return of_q.reshape(g.shape), of_k, of_v

            of_q, of_k, of_v = pull(own, k[:, :, low:b], v[:, :, low:b], True)
            grad_k, grad_v = grad_k.at[:, :, low:b].add(of_k), grad_v.at[:, :, low:b].add(of_v)
            if grad_prefix is not None:
                more, of_k, of_v = pull(shared, *prefix, False)  # type: ignore[arg-type]
                of_q, grad_prefix = of_q + more, (grad_prefix[0] + of_k, grad_prefix[1] + of_v)
            grad_q.append(of_q)
        if grad_prefix is not None:
            grad_prefix = ((grad_prefix[0] * spec.scale).astype(k.dtype), grad_prefix[1].astype(v.dtype))
        return (
            (jnp.concatenate(grad_q, 3) * spec.scale).astype(q.dtype),
            (grad_k * spec.scale).astype(k.dtype),
            grad_v.astype(v.dtype),
            grad_prefix,
        )

    return *_by_kind(spec, windowed, kind, q, k, v, prefix), None, None


plain.defvjp(_keep, _backward)


def _splash(
    spec: Spec,
    interpret: bool,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    prefix: tuple[jax.Array, jax.Array] | None,
    places: Places,
    kind: jax.Array,
) -> jax.Array:
    """The same through the TPU's kernel, and through plain blocks what that cannot say."""
    grid = spec.grid

    def windowed(
        window: int | None, q: jax.Array, k: jax.Array, v: jax.Array, prefix: Any, places: Places
    ) -> jax.Array:
        if not splash.suits(grid.length, grid.prefix, grid.packed, window):
            one = replace(spec, windows=(window,))
            return _plain_heads(one, q, k, v, prefix, places, jnp.int32(0))
        segment = places.segment if grid.packed or prefix is not None else None
        length = places.prefix_length
        return splash.attend(q, k, v, prefix, segment, length, window, spec.scale, interpret)

    return _by_kind(spec, windowed, kind, q, k, v, prefix, places)


def _library(
    spec: Spec,
    kernel: Kernel,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    prefix: tuple[jax.Array, jax.Array] | None,
    places: Places,
    kind: jax.Array,
) -> jax.Array:
    """The same through jax.nn.dot_product_attention, whose cudnn form is a flash kernel on NVIDIA GPUs.

    A row's keys are the prefix's and its own; rows of one segment without a prefix need no mask.
    """
    grid = spec.grid
    if prefix is not None:
        shape = (grid.rows, *prefix[0].shape)
        k, v = (
            jnp.concatenate([jnp.broadcast_to(shared, shape), own], 2)
            for shared, own in zip(prefix, (k, v), strict=True)
        )
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))

    def windowed(window: int | None, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        if prefix is None and not grid.packed:
            size = None if window is None else (window - 1, 0)
            return jax.nn.dot_product_attention(
                q,
                k,
                v,
                scale=spec.scale,
                is_causal=True,
                local_window_size=size,
                implementation=_name(kernel),
            )
        i, j = jnp.arange(grid.length)[:, None], jnp.arange(grid.length)[None]
        seen = (i >= j) & (places.segment[:, :, None] == places.segment[:, None, :])
        if window is not None:
            seen &= i - j < window
        if prefix is not None:
            p = jnp.arange(grid.prefix)
            reached = jnp.broadcast_to(p < places.prefix_length, (grid.rows, grid.length, grid.prefix))
            if window is not None:
                reached &= places.position[:, :, None] - p < window
            seen = jnp.concatenate([reached, seen], 2)
        return jax.nn.dot_product_attention(
            q, k, v, mask=seen[:, None], scale=spec.scale, implementation=_name(kernel)
        )

    return _by_kind(spec, windowed, kind, q, k, v).swapaxes(1, 2)


def _name(kernel: Kernel) -> Literal["xla", "cudnn"]:
    return "cudnn" if kernel == "cudnn" else "xla"
