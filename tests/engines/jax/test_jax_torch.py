"""Invariant 5: the same step as the torch engine; a run may go on from one to the other."""

from __future__ import annotations

import numpy as np
import pytest
from batches import batch, relative, samples
from jax_engines import engine, load, named_gradient

from instep.engines.base import Sampling
from instep.engines.torch.engine import TorchEngine
from instep.objectives import CrossEntropy

LOSS = CrossEntropy()
FAMILIES = ["llama", "qwen2", "qwen3", "gemma3_text"]


def torch_gradient(made):
    trained = made._trainables
    arrays = {name: trained.view(trained.gradient, name).numpy().copy() for name in trained.shapes}
    made.zero_gradient()
    return arrays


@pytest.mark.parametrize("name", FAMILIES)
def test_the_same_loss_logprobs_and_gradient(family, name):
    ours, theirs = engine(family(name)), load(TorchEngine(), family(name))
    packed = batch([samples([9, 14]), samples([20], 3)], 32)
    np.testing.assert_allclose(ours.score(packed).logprob, theirs.score(packed).logprob, rtol=1e-4, atol=1e-5)
    a, b = (one.forward_backward(packed, LOSS) for one in (ours, theirs))
    assert a["loss"] == pytest.approx(b["loss"], rel=1e-5) and a["correct"] == b["correct"]
    mine, their = named_gradient(ours), torch_gradient(theirs)
    assert mine.keys() == their.keys()
    for key, value in mine.items():
        assert relative(value, their[key]) < 1e-4, key


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_the_same_curve_over_twenty_steps_and_across_a_resume(family, name):
    """Ten steps on each engine, then ten more on the other one from its state."""
    steps = [batch([samples([9, 14], seed)], 32) for seed in range(20)]

    def train(made, todo):
        losses = []
        for one in todo:
            sums = made.forward_backward(one, LOSS)
            losses.append(sums["loss"] / sums["weight"])
            assert made.optim_step(1e-2, sums["weight"]).applied
        return losses

    ours, theirs = engine(family(name), warm=False), load(TorchEngine(), family(name), warm=False)
    a, b = train(ours, steps[:10]), train(theirs, steps[:10])
    half_ours, half_theirs = ours.state(), theirs.state()
    ours.load_state(half_theirs)
    theirs.load_state(half_ours)
    a, b = a + train(ours, steps[10:]), b + train(theirs, steps[10:])
    np.testing.assert_allclose(a, b, rtol=1e-3)


def test_the_same_completions_from_the_same_seed(family):
    prompts = [np.arange(5, 16, dtype=np.int32), np.array([7], np.int32)]
    sampling = Sampling(20, temperature=0.8, top_p=0.9, seed=3)
    ours, theirs = (one.generate(prompts, 3, sampling) for one in (
        engine(family("qwen3")), load(TorchEngine(), family("qwen3"))))  # fmt: skip
    for a, b in zip((r for g in ours for r in g), (r for g in theirs for r in g), strict=True):
        assert a.tokens.tolist() == b.tokens.tolist()
        np.testing.assert_allclose(a.logprob, b.logprob, atol=1e-4)
