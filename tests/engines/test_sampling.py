"""Drawing tokens: the distribution, its log-probabilities, and the streams of uniforms."""

from __future__ import annotations

import numpy as np
import pytest

from instep.engines.base import Sampling
from instep.engines.sampling import draw, uniforms


def log_softmax(x):
    x = x - x.max()
    return x - np.log(np.exp(x).sum())


def test_uniforms_are_prefixes_and_independent_streams():
    long, short = uniforms(1, 2, 3, 50), uniforms(1, 2, 3, 10)
    assert np.array_equal(long[:10], short)
    streams = [uniforms(*key, 50) for key in [(1, 2, 3), (1, 2, 4), (1, 3, 3), (2, 2, 3)]]
    for i, a in enumerate(streams):
        for b in streams[i + 1 :]:
            assert not np.isclose(a, b).any()


def test_draws_follow_the_distribution():
    logits = np.random.default_rng(0).normal(size=700).astype(np.float32) * 2
    count = 40_000
    ids, logprob = draw(
        np.repeat(logits[None], count, 0)[:count], (np.arange(count) + 0.5) / count, Sampling(1, 0.8)
    )
    exact = log_softmax(logits.astype(np.float64) / 0.8)
    share = np.bincount(ids, minlength=700) / count
    assert np.abs(share - np.exp(exact)).max() < 1.1 / count + 1e-6
    np.testing.assert_allclose(logprob, exact[ids], atol=1e-5)
    assert (np.diff(ids) >= 0).all()


@pytest.mark.parametrize("uniform", [0.0, np.nextafter(1.0, 0.0)])
def test_the_ends_of_the_unit_interval_give_possible_tokens(uniform):
    logits = np.full((1, 600), -200.0, np.float32)
    logits[0, [300, 301]] = 0.0
    ids, logprob = draw(logits, np.array([uniform]), Sampling(1))
    assert ids[0] in (300, 301)
    assert logprob[0] == pytest.approx(np.log(0.5), abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"top_k": 2}, 2),
        ({"top_p": 0.7}, 2),
        ({"top_p": 0.5}, 1),
        ({"min_p": 0.3}, 3),
        ({"top_k": 3, "top_p": 0.9}, 3),
    ],
)
def test_restricted_draws_are_renormalised(settings, kept):
    probability = np.array([0.05, 0.5, 0.25, 0.2])
    logits = np.log(probability)[None].astype(np.float32)
    allowed = np.argsort(-probability)[:kept]
    for u in np.linspace(0, 0.999, 50):
        ids, logprob = draw(logits, np.array([u]), Sampling(1, **settings))
        assert ids[0] in allowed
        assert np.exp(logprob[0]) == pytest.approx(probability[ids[0]] / probability[allowed].sum(), rel=1e-5)


def test_greedy_takes_the_first_of_equals():
    ids, logprob = draw(np.array([[0.0, 3.0, 3.0]], np.float32), np.array([0.9]), Sampling(1, 0.0))
    assert ids[0] == 1
    assert logprob[0] == pytest.approx(log_softmax(np.array([0.0, 3.0, 3.0]))[1], abs=1e-6)
