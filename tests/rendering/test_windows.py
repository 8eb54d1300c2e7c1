from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instep.errors import InputError
from instep.rendering.template import Rendered
from instep.rendering.windows import kept_head, windows


def conversation(head: int, turns: list[tuple[int, int]]) -> Rendered:
    """Each turn: tokens of context, then supervised tokens. Token ids are their places, so slices can be read."""
    weight, message = [0.0] * head, [-1] * head
    for context, supervised in turns:
        before = message[-1] if message else -1
        weight += [0.0] * context + [1.0] * supervised
        message += [before + 1] * context + [before + 2] * supervised
    tokens = np.arange(len(weight), dtype=np.int32)
    return Rendered(tokens, np.array(weight, np.float32), np.array(message, np.int32), head, "c")


turns_of = st.lists(st.tuples(st.integers(1, 90), st.integers(0, 120)), min_size=1, max_size=12)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 70), turns_of, st.integers(40, 200), st.floats(0, 0.4))
def test_windows_keep_every_promise(
    head: int, turns: list[tuple[int, int]], max_length: int, share: float
) -> None:
    rendered = conversation(head, turns)
    min_context = int(share * max_length)
    samples = windows(rendered, max_length, min_context)
    kept = kept_head(rendered, max_length).tolist()
    seen: list[int] = []
    for sample in samples:
        assert 0 < len(sample) <= max_length
        assert sample.tokens.dtype == np.int32 and sample.weight.dtype == np.float32
        places = sample.tokens.tolist()
        assert places[: len(kept)] == kept
        body = places[len(kept) :]
        assert body == list(range(body[0], body[-1] + 1)), "a window is one slice"
        supervised = [place for place, weight in zip(places, sample.weight, strict=True) if weight > 0]
        assert supervised and sample.weight[0] == 0
        assert places[-1] == supervised[-1], "nothing stands after the last supervised token"
        exists = supervised[0] - rendered.head
        assert supervised[0] - body[0] >= min(min_context, exists)
        assert sample.turns == tuple(sorted(set(rendered.message[supervised].tolist())))
        seen += supervised
    assert seen == np.flatnonzero(rendered.weight).tolist(), "exactly once, in order"
    assert sum(float(sample.weight.sum()) for sample in samples) == float(rendered.weight.sum())


def test_a_short_conversation_is_one_window_without_its_unsupervised_end() -> None:
    rendered = conversation(10, [(5, 7), (5, 9), (30, 0)])
    (sample,) = windows(rendered, 100, 20)
    assert sample.tokens.tolist() == list(range(10 + 5 + 7 + 5 + 9))
    assert sample.turns == (1, 3)


def test_no_window_where_nothing_is_supervised() -> None:
    assert windows(conversation(10, [(50, 0)]), 32, 4) == []


def test_turns_are_not_cut_when_they_fit() -> None:
    rendered = conversation(10, [(10, 40)] * 10)
    for sample in windows(rendered, 110, 20):
        for turn in sample.turns:
            assert (sample.weight[rendered.message[sample.tokens] == turn] > 0).all()


def test_a_turn_longer_than_a_window_is_split_with_context() -> None:
    rendered = conversation(10, [(20, 500)])
    samples = windows(rendered, 100, 25)
    supervised = [np.flatnonzero(sample.weight) for sample in samples]
    assert sum(map(len, supervised)) == 500
    assert all(len(sample) <= 100 for sample in samples)
    assert [len(where) for where in supervised] == pytest.approx([500 / 8] * 8, abs=1)
    assert all(where[0] - 10 >= 25 for where in supervised[1:])


def test_context_starts_with_a_message_where_one_is_near() -> None:
    rendered = conversation(0, [(30, 10)] * 20)
    for sample in windows(rendered, 120, 36)[1:]:
        assert rendered.message[sample.tokens[0]] != rendered.message[sample.tokens[0] - 1]
    for sample in windows(conversation(0, [(100, 10)] * 5), 120, 40)[1:]:
        assert np.flatnonzero(sample.weight)[0] == 40, "no message starts near: the floor itself"


def test_a_long_result_between_turns_is_skipped_but_for_its_end() -> None:
    rendered = conversation(10, [(10, 10), (5000, 10)])
    samples = windows(rendered, 8000, 100)
    assert [len(sample) for sample in samples] == [30, 120]


def test_a_long_head_keeps_its_start_and_end() -> None:
    rendered = conversation(1000, [(50, 50)] * 4)
    samples = windows(rendered, 400, 50)
    assert kept_head(rendered, 400).tolist() == [*range(50), *range(950, 1000)]
    assert all(sample.tokens[:100].tolist() == [*range(50), *range(950, 1000)] for sample in samples)
    assert kept_head(rendered, 2000).tolist() == list(range(1000))


def test_no_room_is_an_error_that_says_what_would_do() -> None:
    with pytest.raises(InputError, match="use a min_context below 90") as caught:
        windows(conversation(10, [(5, 5)]), 100, 95)
    assert "\n" not in str(caught.value)


def test_windows_are_cheaper_than_cutting_when_full() -> None:
    """Against the plain way: fill a window, then start the next at its floor of context."""
    rng = np.random.default_rng(0)
    rendered = conversation(
        50, [(int(rng.exponential(100)) + 1, int(rng.exponential(80)) + 1) for _ in range(300)]
    )
    chosen = sum(map(len, windows(rendered, 2048, 256)))
    total, start = 0, 50
    while start < len(rendered):
        end = min(len(rendered), start + 2048 - 50)
        total += 50 + end - start
        start = end - 256 if end < len(rendered) else end
    assert chosen < total
