"""The TPU's kernel, its program run on this device, against the plain form."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from instep.engines.jax import splash
from instep.engines.jax.attention import Grid, Places, attend
from instep.engines.jax.families import read_architecture
from instep.engines.jax.kernels import choose_kernel

CASES = [  # grid, window, whether the kernel itself is used for the rows
    (Grid(1, 256, 0, True), None, True),
    (Grid(1, 256, 0, True), 100, True),
    (Grid(1, 128, 128, False), None, True),
    (Grid(1, 128, 128, False), 60, False),
    (Grid(2, 64, 0, True), None, False),
]


@pytest.mark.parametrize(("grid", "window", "used"), CASES)
def test_values_and_gradients_equal_the_plain_form(family, monkeypatch, grid, window, used):
    shape = read_architecture(str(family("gemma3_text")))
    kind = dataclasses.replace(shape.kinds[0], window=window)
    shape = dataclasses.replace(shape, kinds=(kind,), heads=2, kv_heads=1, head_dim=8)
    real = 50 if grid.prefix else 0
    third = grid.length // 4
    one = [1] * (grid.length - third) + [0] * third
    if grid.packed:
        one = [1] * third + [2] * (grid.length - 2 * third) + [0] * third
    segment = np.tile(np.array(one, np.int32), (grid.rows, 1))
    position = np.tile(np.arange(grid.length, dtype=np.int32) + real, (grid.rows, 1))
    places = Places(jnp.asarray(segment), jnp.asarray(position), jnp.int32(real))
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((grid.tokens, h, 8)), jnp.float32) for h in (2, 1, 1))
    read = np.concatenate([np.arange(grid.prefix) < real, segment.ravel() > 0])
    cotangent = jnp.asarray(rng.standard_normal(q.shape) * read[:, None, None], jnp.float32)
    calls = []
    genuine = splash.attend
    monkeypatch.setattr(splash, "attend", lambda *args: calls.append(args[0].shape[2]) or genuine(*args))
    results = []
    for kernel in ("interpreted", "plain"):

        def both(q, k, v, kernel=kernel):
            function = lambda *qkv: attend(shape, kernel, grid, *qkv, places, jnp.int32(0))  # noqa: E731
            output, pull = jax.vjp(function, q, k, v)
            return output, *pull(cotangent)

        output, *gradients = jax.jit(both)(q, k, v)
        results.append([output[read], *gradients])
    rows_seen = [length for length in calls if length == grid.length]
    assert bool(rows_seen[1 if grid.prefix == grid.length else 0 :]) == used
    for mine, theirs in zip(*results, strict=True):
        assert float(jnp.linalg.norm(mine - theirs) / jnp.linalg.norm(theirs)) < 1e-5


def test_a_cpu_takes_the_plain_form_and_says_why():
    kernel, why = choose_kernel(jax.devices("cpu")[0], jnp.bfloat16, 64)
    assert kernel == "plain" and "cpu" in why
