"""Generation: what is returned is what was sampled, whatever shares the batch."""

from __future__ import annotations

import numpy as np
import pytest
from jax_engines import engine

from instep.engines.base import Sampling
from instep.records import Batch, StopReason

PROMPTS = [np.arange(5, 16, dtype=np.int32), np.arange(40, 44, dtype=np.int32), np.array([7], np.int32)]
FAMILIES = ["llama", "qwen2", "qwen3", "gemma3_text"]


def rescore(made, prompt, rollout, temperature):
    full = np.concatenate([prompt, rollout.tokens])[None].astype(np.int32)
    count = len(rollout.tokens)
    site = np.arange(len(prompt) - 1, len(prompt) - 1 + count, dtype=np.int32)
    position = np.arange(full.size, dtype=np.int32)[None]
    one = Batch(full, np.ones_like(full), position, site, rollout.tokens, np.ones(count, np.float32))
    return made.score(one, temperature)


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_greedy_batched_equals_single_and_is_the_argmax(family, name):
    """70 tokens: more than the cache has room for at first, and many windows of Gemma's."""
    made = engine(family(name))
    greedy = Sampling(max_new_tokens=70, temperature=0.0, stop_tokens=(3, 4))
    together = made.generate(PROMPTS, 2, greedy)
    for prompt, group in zip(PROMPTS, together, strict=True):
        alone = made.generate([prompt], 1, greedy)[0][0]
        for rollout in group:
            assert rollout.tokens.tolist() == alone.tokens.tolist()
            scores = rescore(made, prompt, rollout, 1.0)
            assert scores.correct.all()
            assert np.abs(scores.logprob - rollout.logprob).max() < 1e-3


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_logprobs_match_a_rescore(family, name):
    made = engine(family(name))
    drawn = made.generate(PROMPTS, 4, Sampling(70, temperature=0.7, stop_tokens=(3, 4, 5), seed=2))
    assert (
        len({len(rollout.tokens) for group in drawn for rollout in group}) > 2
    )  # rows left at different steps
    for prompt, group in zip(PROMPTS, drawn, strict=True):
        for rollout in group:
            again = rescore(made, prompt, rollout, 0.7).logprob
            assert np.abs(again - rollout.logprob).max() < 1e-3
            stopped = rollout.tokens[-1] in (3, 4, 5)
            assert (rollout.stop == StopReason.END_OF_TURN) == stopped
            assert stopped or len(rollout.tokens) == 70
            assert not np.isin(rollout.tokens[:-1], (3, 4, 5)).any()


def test_a_row_does_not_depend_on_what_shares_its_batch(family):
    made = engine(family("llama"))
    sampling = Sampling(20, seed=9)
    many = made.generate(PROMPTS, 3, sampling, keys=[4, 5, 6])
    few = made.generate([PROMPTS[1]], 2, sampling, keys=[5])
    for ours, theirs in zip(few[0], many[1][:2], strict=True):
        assert ours.tokens.tolist() == theirs.tokens.tolist()
    assert len({tuple(r.tokens) for group in many for r in group}) == 9
    other = made.generate(PROMPTS, 3, Sampling(20, seed=10), keys=[4, 5, 6])
    assert other[0][0].tokens.tolist() != many[0][0].tokens.tolist()


def test_every_call_draws_with_fresh_noise_and_the_same_call_draws_the_same(family):
    made = engine(family("gemma3_text"))

    def ids(seed, keys):
        drawn = made.generate([PROMPTS[0]] * 2, 2, Sampling(12, seed=seed), keys=keys)
        return [rollout.tokens.tolist() for group in drawn for rollout in group]

    first, again, later, reseeded = ids(1, [0, 1]), ids(1, [0, 1]), ids(1, [2, 3]), ids(2, [0, 1])
    assert first == again
    assert len({tuple(one) for one in (*first, *later, *reseeded)}) == 12


def test_one_program_draws_all_tokens_of_a_shape(family):
    from instep.engines.jax.generate import decode

    made = engine(family("llama"), head_chunk=19)  # a setting that no other test has compiled
    before = decode.jitted._cache_size()
    for seed in range(2):
        made.generate(PROMPTS[:1], 4, Sampling(6, seed=seed))
    assert decode.jitted._cache_size() == before + 1


def test_stop_text_streaming_and_reference(family):
    made = engine(family("llama"))
    seen = []
    drawn = made.generate(
        PROMPTS[:1],
        2,
        Sampling(30, seed=1),
        stop_text=lambda ids: len(ids) == 6,
        on_token=lambda prompt, sample, token: seen.append((prompt, sample, token)),
    )
    for sample, rollout in enumerate(drawn[0]):
        assert len(rollout.tokens) == 6 and rollout.stop == StopReason.STOP_STRING
        assert [t for p, s, t in seen if (p, s) == (0, sample)] == rollout.tokens.tolist()
    base = engine(family("llama"), warm=False).generate(PROMPTS, 1, Sampling(10, temperature=0.0))
    off = made.generate(PROMPTS, 1, Sampling(10, temperature=0.0), adapter=False)
    assert [g[0].tokens.tolist() for g in off] == [g[0].tokens.tolist() for g in base]
