"""Invariants of one training step: design, section 6."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from batches import batch, relative, samples
from jax_engines import engine, gradient, named_gradient

from instep.objectives import CrossEntropy, Grpo

LOSS = CrossEntropy()
FAMILIES = ["llama", "qwen2", "qwen3", "gemma3_text"]


def run(made, *batches):
    loss = sum(made.forward_backward(b, LOSS)["loss"] for b in batches)
    return loss, gradient(made)


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_loss_and_gradient_do_not_depend_on_layout(family, name):
    made = engine(family(name))
    four = samples([9, 14, 5, 20])
    one_by_one = run(made, *(batch([[s]], 24) for s in four))
    for layout in (
        [batch([[s] for s in four], 24)],
        [batch([four], 64, sites=80)],
        [batch([four[:2], four[2:]], 32)],
        [batch([four[:1]], 9), batch([four[1:]], 100, pad=2)],
    ):
        loss, grad = run(made, *layout)
        assert abs(loss - one_by_one[0]) <= 1e-5 * abs(one_by_one[0])
        assert relative(grad, one_by_one[1]) < 1e-5


def test_padding_ids_change_nothing(family):
    """Pad = eos included: id 2 is the end token of these models."""
    made = engine(family("llama"))
    packed = samples([9, 14])
    plain = run(made, batch([packed], 40, pad=0))
    for pad in (2, 77):
        other = run(made, batch([packed], 40, pad=pad))
        assert plain[0] == other[0]
        assert np.array_equal(plain[1], other[1])


def test_an_end_token_is_trained_where_it_is_the_pad_token_too(family):
    made = engine(family("llama"))
    ids, weight = samples([12])[0]
    weight[:] = 0
    ids[7], weight[7] = 2, 1.0
    sums = made.forward_backward(batch([[(ids, weight)]], 16, pad=2), LOSS)
    assert sums["sites"] == 1 and sums["loss"] > 0
    assert np.abs(gradient(made)).max() > 0


def test_a_masked_token_has_no_influence(family):
    made = engine(family("llama"))
    ids, weight = samples([20])[0]
    weight[:] = 0
    weight[[4, 9]] = 1.0
    changed = ids.copy()
    changed[10:] = (changed[10:] + 5) % 97  # behind the last supervised token
    plain, other = (run(made, batch([[(x, weight)]], 24)) for x in (ids, changed))
    assert plain[0] == other[0] and np.array_equal(plain[1], other[1])
    silent = dataclasses.replace(batch([[(ids, weight)]], 24), weight=np.zeros(2, np.float32))
    made.forward_backward(silent, LOSS)
    assert not gradient(made).any()


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_checkpointing_changes_nothing(family, name):
    packed = batch([samples([9, 14]), samples([20], 3)], 32)
    plain = run(engine(family(name)), packed)
    again = run(engine(family(name), gradient_checkpointing=True), packed)
    assert abs(plain[0] - again[0]) <= 1e-6 * abs(plain[0])
    assert relative(again[1], plain[1]) < 1e-5


def test_every_adapter_matrix_learns_within_two_steps(family):
    made = engine(family("llama"), warm=False)
    before = made.state().parameters
    assert all(not value.any() for name, value in before.items() if "lora_B" in name)
    for _ in range(2):
        sums = made.forward_backward(batch([samples([9, 14])], 32), LOSS)
        report = made.optim_step(1e-2, sums["weight"])
        assert report.applied and report.gradient_norm > 0
    after = made.state()
    for name, value in after.parameters.items():
        assert not np.array_equal(value, before[name]), name
        assert after.exp_avg[name].any(), name


def test_the_loss_falls(family):
    made = engine(family("llama"), warm=False)
    packed = batch([samples([9, 14])], 32)
    losses = []
    for _ in range(30):
        sums = made.forward_backward(packed, LOSS)
        losses.append(sums["loss"] / sums["weight"])
        made.optim_step(2e-2, sums["weight"])
    assert losses[-1] < 0.5 * losses[0]


def test_a_bad_batch_is_not_applied(family):
    made = engine(family("llama"))
    good = batch([samples([9, 14])], 32)
    bad = dataclasses.replace(
        good, weight=np.where(good.weight > 0, np.float32(np.inf), 0).astype(np.float32)
    )
    before = made.state()
    sums = made.forward_backward(bad, LOSS)
    made.forward_backward(good, LOSS)
    assert not np.isfinite(sums["loss"])
    assert not made.optim_step(1e-2, 1.0).applied
    after = made.state()
    assert after.step == before.step
    assert all(np.array_equal(after.parameters[n], before.parameters[n]) for n in before.parameters)
    sums = made.forward_backward(good, LOSS)
    assert made.optim_step(1e-2, sums["weight"]).applied


def test_a_gradient_that_is_not_finite_is_not_applied(family):
    made = engine(family("llama"))
    sums = made.forward_backward(batch([samples([9, 14])], 32), LOSS)
    before = made.state()
    q = made._trained.gradient["q_proj"]
    q["a"] = q["a"].at[1, 0, 3].set(np.nan)
    report = made.optim_step(1e-2, sums["weight"])
    assert not report.applied and not np.isfinite(report.gradient_norm)
    after = made.state()
    assert after.step == before.step and not gradient(made).any()
    assert all(np.array_equal(after.parameters[n], before.parameters[n]) for n in before.parameters)


def test_resumed_equals_uninterrupted_bit_for_bit(family):
    steps = [batch([samples([9, 14], seed)], 32) for seed in range(6)]

    def train(made, todo):
        for b in todo:
            made.optim_step(1e-2, made.forward_backward(b, LOSS)["weight"])
        return made.state()

    whole = train(engine(family("llama"), warm=False), steps)
    half = train(engine(family("llama"), warm=False), steps[:3])
    resumed = engine(family("llama"), seed=5, warm=False)
    resumed.load_state(half)
    end = train(resumed, steps[3:])
    assert end.step == whole.step == 6
    for group in ("parameters", "exp_avg", "exp_avg_sq"):
        ours, theirs = getattr(end, group), getattr(whole, group)
        assert all(np.array_equal(ours[n], theirs[n]) for n in theirs)


def test_adamw_equals_torch(family):
    import torch

    made = engine(family("llama"))
    state = made.state()
    leaves = {n: torch.nn.Parameter(torch.from_numpy(v.copy())) for n, v in state.parameters.items()}
    theirs = torch.optim.AdamW(leaves.values(), lr=1e-2, weight_decay=0.01)
    for seed in range(3):
        sums = made.forward_backward(batch([samples([9, 14], seed)], 32), LOSS)
        for name, value in made._names.unstack(made._trained.gradient).items():
            leaves[name].grad = torch.from_numpy(value) / sums["weight"]
        norm = torch.nn.utils.clip_grad_norm_(leaves.values(), 1.0)
        theirs.step()
        report = made.optim_step(1e-2, sums["weight"])
        assert report.gradient_norm == pytest.approx(float(norm), rel=1e-5)
    for name, value in made.state().parameters.items():
        np.testing.assert_allclose(value, leaves[name].detach().numpy(), rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_a_shared_prefix_equals_the_plain_batch(family, name):
    rng = np.random.default_rng(4)
    prompt = rng.integers(3, 97, 11).astype(np.int32)
    tails = samples([5, 9, 7], 6)
    full = [
        (np.concatenate([prompt, ids]), np.concatenate([np.zeros(11, np.float32), w])) for ids, w in tails
    ]
    plain = batch([[s] for s in full], 24)
    shared = batch([[s] for s in tails], 12)
    shared = dataclasses.replace(shared, position=shared.position + 11, prefix=prompt)
    packed = batch([tails], 24)  # three segments of one row continue the prefix
    packed = dataclasses.replace(packed, position=packed.position + 11, prefix=prompt)
    for checkpointing in (False, True):
        made = engine(family(name), gradient_checkpointing=checkpointing)
        loss, grad = run(made, plain)
        for one in (shared, packed):
            ours, ours_grad = run(made, one)
            assert abs(ours - loss) <= 1e-6 * abs(loss)
            assert relative(ours_grad, grad) < 1e-4


@pytest.mark.parametrize("variant", ["grpo", "gspo"])
def test_the_ratio_is_one_before_the_first_update(family, variant):
    """And the gradient of a clipped objective is that of its numbers, padding sites included."""
    made = engine(family("qwen3"))
    packed = batch([[s] for s in samples([9, 14, 12])], 16, sites=64)
    rng = np.random.default_rng(0)
    count = len(packed.site)
    sequence = np.minimum(packed.site // 16, 2).astype(np.int32)
    fields = {
        "behaviour_logprob": made.score(packed, 0.8).logprob,
        "reference_logprob": made.score(packed, 0.8, adapter=False).logprob,
        "advantage": rng.standard_normal(3).astype(np.float32)[sequence],
        "sequence": sequence,
        "sequences": 3,
    }
    full = dataclasses.replace(packed, **fields)
    objective = Grpo(variant, beta=0.04, temperature=0.8, sequences=3 if variant == "gspo" else 0)
    sums = made.forward_backward(full, objective)
    assert sums["max_log_ratio"] < 1e-5 and sums["kl"] > 0
    assert sums["ratio"] == pytest.approx(sums["sites"], rel=1e-5)
    grad = named_gradient(made)
    assert count == 64 and all(np.isfinite(value).all() and value.any() for value in grad.values())


def test_few_shapes_are_compiled(family):
    from instep.engines.jax import step
    from instep.engines.jax.layout import bucket

    made = engine(family("llama"), head_chunk=11)  # a setting that no other test has compiled
    before = step.accumulate.jitted._cache_size()
    seconds = [made.compile_seconds]
    for length in range(5, 60, 5):  # lengths and numbers of sites differ
        made.forward_backward(batch([samples([length])], length), LOSS)
        seconds.append(made.compile_seconds)
    assert step.accumulate.jitted._cache_size() == before + 1
    assert seconds[0] < seconds[1] == seconds[-1]
    for _ in range(3):  # nor does a step leave anything elsewhere than the one before found it
        made.optim_step(1e-3, made.forward_backward(batch([samples([9])], 9), LOSS)["weight"])
        seconds.append(made.compile_seconds)
    assert seconds[-3] == seconds[-1]
    assert step.accumulate.jitted._cache_size() == before + 1
    assert len({bucket(n, 64) for n in range(1, 4097)}) == 20
    assert all(n <= bucket(n, 64) <= max(64, n * 1.25 + 64) for n in range(1, 5000))
