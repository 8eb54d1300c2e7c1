"""Sampling completions: each prompt is run once, its rows read its keys and values where they lie.

Rows stand in a grid [prompts, G], so that the rows of one prompt share one product with its keys. One step is one
compiled function; tokens are drawn on the host, as on every engine. When at most half of the grid is still at
work, what is left moves to a smaller grid, whose sides are powers of two: few shapes occur.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from instep.engines.base import Sampling
from instep.engines.decoding import Row, advance, rows_of
from instep.engines.jax import decoder
from instep.engines.jax.attention import HIDDEN, Grid, Places
from instep.engines.jax.compile_time import compiled
from instep.engines.jax.decoder import Setup
from instep.engines.jax.head import capped
from instep.engines.jax.layout import bucket, power_of_two
from instep.engines.jax.lora import Tree
from instep.engines.jax.mesh import DATA, Placement, fetch
from instep.engines.jax.weights import Weights
from instep.records import Rollout

FIRST_CAPACITY = 64  # own tokens per row that the cache first has room for; doubled when full
ROWS_AT_ONCE = 64
Cache = tuple[jax.Array, jax.Array]


def _logits(setup: Setup, weights: Weights, states: jax.Array) -> jax.Array:
    """States before the final norm [K, D] → float32 [K, V]."""
    normed = decoder.final_norm(setup.architecture, weights, states)
    with setup.precision(normed.dtype):
        raw = jnp.einsum("kd,vd->kv", normed, decoder.head(weights), preferred_element_type=jnp.float32)
    return capped(raw, setup.architecture.logit_softcap)


@compiled(static_argnums=(0,))
def prefill(
    setup: Setup, weights: Weights, lora: Tree | None, tokens: jax.Array, lengths: jax.Array
) -> tuple[jax.Array, Cache]:
    """tokens int32 [n, P], padded behind `lengths` [n] → logits float32 [n, V] of what comes next, and keys and
    values [layers, n, H_kv, P, d]."""
    count, length = tokens.shape
    position = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), tokens.shape)
    places = Places(jnp.ones_like(tokens), position, jnp.int32(0))
    grid = Grid(count, length, 0, False)
    states, kept = decoder.hidden_states(
        setup, weights, lora, grid, tokens.reshape(-1), position.reshape(-1), places, keep_keys=True
    )
    last = states.reshape(count, length, -1)[jnp.arange(count), lengths - 1]
    keys, values = (x.reshape(x.shape[0], count, length, *x.shape[2:]).swapaxes(2, 3) for x in kept)
    return _logits(setup, weights, last), (keys, values)


def _decode_attention(
    setup: Setup, q: jax.Array, prompt: Cache, own: Cache, lengths: jax.Array, at: jax.Array, kind: jax.Array
) -> jax.Array:
    """One query a row: q [n·G, H, d], prompt keys [n, H_kv, P, d], own ones [n, G, H_kv, C, d] of which 0 … `at`
    are there, → [n·G, H, d]."""
    count, heads, places, width = prompt[0].shape
    rows = own[0].shape[1]
    q = (q * jnp.asarray(setup.architecture.attention_scale, q.dtype)).reshape(count, rows, heads, -1, width)
    shared = jnp.einsum("ngkrd,nkpd->ngkrp", q, prompt[0], preferred_element_type=jnp.float32)
    mine = jnp.einsum("ngkrd,ngkcd->ngkrc", q, own[0], preferred_element_type=jnp.float32)
    far = np.iinfo(np.int32).max
    windows = jnp.asarray(
        [far if k.window is None else k.window for k in setup.architecture.kinds], jnp.int32
    )
    p, c = jnp.arange(places), jnp.arange(own[0].shape[3])
    seen = (p < lengths[:, None]) & (lengths[:, None] + at - p < windows[kind])
    scores = jnp.concatenate(
        [
            jnp.where(seen[:, None, None, None], shared, HIDDEN),
            jnp.where((c <= at) & (at - c < windows[kind]), mine, HIDDEN),
        ],
        -1,
    )
    weight = jax.nn.softmax(scores, -1).astype(q.dtype)
    mixed = jnp.einsum("ngkrp,nkpd->ngkrd", weight[..., :places], prompt[1])
    mixed += jnp.einsum("ngkrc,ngkcd->ngkrd", weight[..., places:], own[1])
    return mixed.reshape(count * rows, -1, width)


@compiled(static_argnums=(0,), donate_argnums=(4,))
def decode(
    setup: Setup,
    weights: Weights,
    lora: Tree | None,
    prompt: Cache,
    own: Cache,
    lengths: jax.Array,
    tokens: jax.Array,
    at: jax.Array,
) -> tuple[jax.Array, Cache]:
    """One more token of every row: tokens int32 [n, G] are each row's token `at` → logits float32 [n·G, V], and
    the rows' own keys and values [layers, n, G, H_kv, C, d] with that token's in place."""
    architecture = setup.architecture
    position = jnp.broadcast_to((lengths + at)[:, None], tokens.shape).reshape(-1)
    tables = decoder.rope_tables(architecture, position)
    x = decoder.embed(architecture, weights, tokens.reshape(-1))

    def body(carry: Any, layer: Sequence[Any]) -> tuple[Any, None]:
        x, cache = carry
        matrices, adapters, kind, index, shared = layer

        def attention(q: jax.Array, k: jax.Array, v: jax.Array, kind: jax.Array) -> tuple[jax.Array, Any]:
            def put(held: jax.Array, new: jax.Array) -> jax.Array:
                new = new.reshape(1, *held.shape[1:4], 1, held.shape[5])
                return jax.lax.dynamic_update_slice(held, new, (index, 0, 0, 0, at, 0))

            held = tuple(put(*pair) for pair in zip(cache, (k, v), strict=True))
            mine = tuple(jax.lax.dynamic_index_in_dim(x, index, 0, keepdims=False) for x in held)
            return _decode_attention(setup, q, shared, mine, lengths, at, kind), held

        return decoder.layer_forward(setup, x, matrices, adapters, kind, tables, attention), None

    layers = jnp.arange(architecture.layers)
    with setup.precision(x.dtype):
        (x, own), _ = jax.lax.scan(
            body, (x, own), (weights["layers"], lora, decoder.kinds_of_layers(architecture), layers, prompt)
        )
    return _logits(setup, weights, x), own


def _empty(prompt: Cache, group: int, capacity: int, placement: Placement) -> Cache:
    """Room for own keys and values [layers, n, G, H_kv, capacity, d]. They are put somewhere from the start, so that
    the second token's step is the program of the first's."""
    layers, count, heads, _, width = prompt[0].shape
    shape = (layers, count, group, heads, capacity, width)
    where = placement.sharding((None, DATA) if placement.data > 1 else (), shape)
    return jnp.zeros(shape, prompt[0].dtype, device=where), jnp.zeros(shape, prompt[1].dtype, device=where)


class _Grid:
    """The rows under way, each in a slot (prompt, place) of a grid, and their caches."""

    def __init__(
        self,
        rows: list[Row],
        prompts: list[int],
        prompt: Cache,
        lengths: np.ndarray,
        placement: Placement,
    ) -> None:
        """`rows` stand prompt by prompt, equally many of each of `prompts`."""
        self.prompt: Cache = prompt
        self.lengths = lengths
        self.count, self.group = len(lengths), len(rows) // len(prompts)
        self.slot = {id(row): i for i, row in enumerate(rows)}
        self.capacity = FIRST_CAPACITY
        self.own: Cache = _empty(prompt, self.group, self.capacity, placement)

    def tokens(self, rows: Sequence[Row]) -> np.ndarray:
        out = np.zeros(self.count * self.group, np.int32)
        out[[self.slot[id(row)] for row in rows]] = [row.ids[-1] for row in rows]
        return out.reshape(self.count, self.group)

    def slots(self, rows: Sequence[Row]) -> np.ndarray:
        return np.array([self.slot[id(row)] for row in rows])

    def make_room(self, needed: int) -> None:
        if needed <= self.capacity:
            return
        grown = self.capacity
        self.capacity *= 2
        self.own = tuple(  # type: ignore[assignment]
            jnp.pad(x, [(0, 0)] * 4 + [(0, grown), (0, 0)]) for x in self.own
        )

    def shrink(self, rows: Sequence[Row]) -> None:
        """Move to a smaller grid where that has at most half the places."""
        by_prompt: dict[int, list[Row]] = {}
        for row in rows:
            by_prompt.setdefault(self.slot[id(row)] // self.group, []).append(row)
        count = power_of_two(len(by_prompt))
        group = power_of_two(max(map(len, by_prompt.values())))
        if 2 * count * group > self.count * self.group:
            return
        places = np.zeros((count, group), np.int64)  # what no row stands in repeats the first place
        old = self.slot
        self.slot = {}
        for i, members in enumerate(by_prompt.values()):
            for j, row in enumerate(members):
                places[i, j] = old[id(row)]
                self.slot[id(row)] = i * group + j
        kept = np.zeros(count, np.int64)
        kept[: len(by_prompt)] = list(by_prompt)
        self.own = tuple(  # type: ignore[assignment]
            x.reshape(x.shape[0], -1, *x.shape[3:])[:, places] for x in self.own
        )
        keys, values = self.prompt
        self.prompt = keys[:, kept], values[:, kept]
        self.lengths = self.lengths[kept]
        self.count, self.group = count, group


class Generator:
    """Draws completions with one set of weights."""

    def __init__(
        self, setup: Setup, weights: Weights, lora: Tree | None, placement: Placement, multiple: int
    ) -> None:
        self._setup, self._weights, self._lora = setup, weights, lora
        self._placement, self._multiple = placement, multiple

    def __call__(
        self,
        prompts: Sequence[np.ndarray],
        n: int,
        sampling: Sampling,
        keys: Sequence[int],
        stop_text: Callable[[np.ndarray], bool] | None,
        on_token: Callable[[int, int, int], None] | None,
    ) -> list[list[Rollout]]:
        rows = rows_of(len(prompts), n, sampling, keys)
        together = max(1, ROWS_AT_ONCE // n) * n  # whole prompts, so that each is run once
        for a in range(0, len(rows), together):
            self._run(prompts, rows[a : a + together], sampling, stop_text, on_token)
        done = [row.rollout() for row in rows]
        return [done[p * n : (p + 1) * n] for p in range(len(prompts))]

    def _prefill(
        self, prompts: Sequence[np.ndarray], used: Sequence[int]
    ) -> tuple[np.ndarray, Cache, np.ndarray]:
        """Logits [n, V], keys and values, and lengths int32 [n]; n is a power of two, its rest repeats a prompt."""
        count = power_of_two(len(used))
        chosen = [prompts[p] for p in used] + [prompts[used[0]]] * (count - len(used))
        lengths = np.array([len(prompt) for prompt in chosen], np.int32)
        tokens = np.zeros((count, bucket(int(lengths.max()), self._multiple)), np.int32)
        for row, prompt in zip(tokens, chosen, strict=True):
            row[: len(prompt)] = prompt
        put = self._placement.put
        logits, kept = prefill(self._setup, self._weights, self._lora, put(tokens), put(lengths))
        return fetch(logits), kept, lengths

    def _run(
        self,
        prompts: Sequence[np.ndarray],
        rows: list[Row],
        sampling: Sampling,
        stop_text: Callable[[np.ndarray], bool] | None,
        on_token: Callable[[int, int, int], None] | None,
    ) -> None:
        used = sorted({row.prompt for row in rows})
        logits, kept, lengths = self._prefill(prompts, used)
        logits = logits[[used.index(row.prompt) for row in rows]]
        grid = _Grid(rows, used, kept, lengths, self._placement)
        put, active, at = self._placement.put, rows, 0
        while True:
            advance(active, logits, sampling, stop_text, on_token)
            active = [row for row in active if row.stop is None]
            if not active:
                return
            grid.shrink(active)
            grid.make_room(at + 1)
            computed, grid.own = decode(
                self._setup, self._weights, self._lora, grid.prompt, grid.own,
                put(grid.lengths), put(grid.tokens(active)), put(np.int32(at)),
            )  # fmt: skip
            logits = fetch(computed)[grid.slots(active)]
            at += 1
