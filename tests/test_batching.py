"""Order, packing and fixed shapes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from instep.batching import collate, fingerprint, make_order, pack
from instep.engines.base import ShapeRules
from instep.records import Sample

lengths_strategy = st.lists(st.integers(1, 100), min_size=1, max_size=60)


def sample(length: int, seed: int = 0) -> Sample:
    rng = np.random.default_rng([seed, length])
    weight = rng.integers(0, 2, length).astype(np.float32)
    weight[0] = 0
    return Sample(rng.integers(1, 90, length).astype(np.int32), weight, f"c{seed}")


@given(lengths_strategy)
def test_every_sample_is_packed_once_and_fits(lengths: list[int]) -> None:
    rows = pack(lengths, 100)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in row) <= 100 for row in rows)
    # Best fit leaves no two rows that would fit together (a bound that first-fit packers share).
    fills = sorted(sum(lengths[index] for index in row) for row in rows)
    assert len(fills) < 2 or fills[0] + fills[1] > 100


def test_a_sample_longer_than_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match="101 tokens"):
        pack([5, 101], 100)


@given(lengths_strategy, st.integers(1, 5), st.integers(0, 3))
def test_every_epoch_visits_every_row_once(lengths: list[int], rows_per_step: int, seed: int) -> None:
    samples = [sample(length, seed) for length in lengths]
    order = make_order(samples, 100, True, rows_per_step, seed)
    for epoch in range(2):
        steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
        seen = [row for step in steps for row in order.step(step)]
        assert sorted(seen) == sorted(order.rows)


@given(st.lists(st.lists(st.integers(2, 30), min_size=1, max_size=4), min_size=1, max_size=4))
def test_a_batch_holds_every_supervised_token_at_the_site_before_it(layout: list[list[int]]) -> None:
    rows = [[sample(length, 10 * r + i) for i, length in enumerate(row)] for r, row in enumerate(layout)]
    batch = collate(rows, ShapeRules(16, 8))
    count, length = batch.tokens.shape
    assert count == len(rows) and length % 16 == 0 and len(batch.site) % 8 == 0
    flat_tokens, flat_segment = batch.tokens.reshape(-1), batch.segment.reshape(-1)
    real = batch.weight > 0
    expected = [int(t) for row in rows for s in row for t in s.tokens[s.weight > 0]]
    assert batch.label[real].tolist() == expected == flat_tokens[batch.site[real] + 1].tolist()
    # The site and its label lie in one segment: no sample predicts the next one's first token.
    assert (flat_segment[batch.site[real]] == flat_segment[batch.site[real] + 1]).all()
    assert (flat_segment[batch.site[real]] > 0).all()
    for r, row in enumerate(rows):
        for number, one in enumerate(row, start=1):
            inside = batch.segment[r] == number
            assert batch.position[r][inside].tolist() == list(range(len(one)))
    assert batch.real_tokens == sum(len(s) for row in rows for s in row)


def test_missing_rows_are_padding_without_influence() -> None:
    batch = collate([[sample(10)]], ShapeRules(16, 8), row_count=3)
    assert batch.tokens.shape == (3, 16)
    assert not batch.segment[1:].any()
    assert not batch.weight[batch.site >= 16].any()


def test_rl_fields_travel_with_their_sites() -> None:
    one = sample(12)
    values = np.arange(12, dtype=np.float32)
    both = Sample(one.tokens, one.weight, "a", (), values, values + 100, values + 200)
    batch = collate([[both], [both]], ShapeRules(8, 8))
    wanted = values[one.weight > 0]
    real = batch.weight > 0
    assert batch.behaviour_logprob is not None and batch.advantage is not None and batch.sequence is not None
    assert batch.behaviour_logprob[real].tolist() == [*wanted, *wanted]
    assert batch.advantage[real].tolist() == [*(wanted + 200), *(wanted + 200)]
    assert batch.sequence[real].tolist() == [0] * len(wanted) + [1] * len(wanted)
    assert collate([[one]], ShapeRules(8, 8)).advantage is None


def test_the_fingerprint_sees_tokens_and_weights() -> None:
    one = sample(12)
    moved = one.weight.copy()
    moved[3] = 1 - moved[3]
    assert fingerprint([one]) == fingerprint([sample(12)])
    assert fingerprint([one]) != fingerprint([Sample(one.tokens, moved)])
    assert fingerprint([one]) != fingerprint([Sample(one.tokens[::-1], one.weight)])
