"""Invariants of one training step on MLX, and the same step as the PyTorch engine's (design, section 6)."""

from __future__ import annotations

import dataclasses

import mlx.core as mx
import numpy as np
import pytest
from batches import batch, relative, samples
from mlx_engines import engine, gradient, pair, torch_gradient

from instep.objectives import CrossEntropy, Grpo

LOSS = CrossEntropy()
FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "phi3", "gemma3_text", "gemma2"]


def run(made, *batches):
    loss = sum(made.forward_backward(b, LOSS)["loss"] for b in batches)
    return loss, gradient(made)


def rows_for(name: str):
    """Packed rows longer than the tiny models' window of 6, but for gemma2, whose window mlx-lm leaves out."""
    if name == "gemma2":
        return batch([samples([3, 2]), samples([5], 2)], 6, sites=16)
    return batch([samples([9, 30]), samples([41], 2)], 48, sites=64)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_same_step_as_the_torch_engine(family, name):
    theirs, ours = pair(family(name))
    packed = rows_for(name)
    a, b = theirs.score(packed), ours.score(packed)
    real = packed.weight > 0
    np.testing.assert_allclose(b.logprob[real], a.logprob[real], rtol=1e-4)
    assert np.array_equal(b.correct[real], a.correct[real])
    expected, got = theirs.forward_backward(packed, LOSS), ours.forward_backward(packed, LOSS)
    assert got["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    assert (got["correct"], got["sites"], got["weight"]) == tuple(
        expected[key] for key in ("correct", "sites", "weight")
    )
    assert relative(gradient(ours), torch_gradient(theirs)) < 1e-4


@pytest.mark.parametrize("variant", ["grpo", "gspo", "dr_grpo"])
def test_the_same_grpo_step_as_the_torch_engine(family, variant):
    theirs, ours = pair(family("llama"))
    packed = batch([[s] for s in samples([9, 14, 12])], 16, sites=32)
    rng = np.random.default_rng(3)
    before = theirs.score(packed, 0.7).logprob
    count = len(packed.site)
    starts = packed.site // 16
    rl = dataclasses.replace(
        packed,
        behaviour_logprob=(before + 0.3 * rng.standard_normal(count)).astype(np.float32),
        reference_logprob=(before + 0.3 * rng.standard_normal(count)).astype(np.float32),
        advantage=rng.standard_normal(count).astype(np.float32),
        sequence=starts.astype(np.int32),
        sequences=3,
    )
    objective = Grpo(variant=variant, beta=0.1, temperature=0.7, sequences=3)
    expected, got = theirs.forward_backward(rl, objective), ours.forward_backward(rl, objective)
    for key, value in expected.items():
        assert got[key] == pytest.approx(value, rel=1e-4, abs=1e-5), key
    assert relative(gradient(ours), torch_gradient(theirs)) < 1e-4


def test_the_same_loss_curve_over_twenty_steps(family):
    theirs, ours = pair(family("llama"))
    for step in range(20):
        one = batch([samples([9, 14], step), samples([20], step + 50)], 32)
        losses = []
        for made in (theirs, ours):
            sums = made.forward_backward(one, LOSS)
            losses.append(sums["loss"] / sums["weight"])
            report = made.optim_step(1e-2 / (1 + step), sums["weight"])
            assert report.applied
        assert losses[1] == pytest.approx(losses[0], rel=1e-3), step
    a, b = theirs.state(), ours.state()
    assert a.step == b.step == 20
    for name in a.parameters:
        assert relative(b.parameters[name], a.parameters[name]) < 1e-2, name


def test_a_state_is_handed_over_in_both_directions(family):
    theirs, ours = pair(family("llama"))

    def train(made, seeds):
        for seed in seeds:
            sums = made.forward_backward(batch([samples([9, 14], seed)], 32), LOSS)
            made.optim_step(1e-2, sums["weight"])
        return made

    whole = train(theirs, range(6)).state()
    train(ours, range(3))
    other, last = pair(family("llama"))
    other.load_state(ours.state())
    last.load_state(train(other, range(3, 5)).state())
    end = train(last, range(5, 6)).state()
    for group in ("parameters", "exp_avg", "exp_avg_sq"):
        for name, value in getattr(whole, group).items():
            assert relative(getattr(end, group)[name], value) < 1e-3, (group, name)


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


def test_padding_and_masked_tokens_have_no_influence(family):
    made = engine(family("llama"))
    packed = samples([9, 14])
    plain, other = (run(made, batch([packed], 40, pad=pad)) for pad in (0, 77))
    assert plain[0] == other[0] and np.array_equal(plain[1], other[1])
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


def prefixed(tails, prompt, length):
    shared = batch([[s] for s in tails], length)
    return dataclasses.replace(shared, position=shared.position + len(prompt), prefix=prompt)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3_text", "mistral", "phi3"])
def test_a_shared_prefix_equals_the_plain_batch(family, name):
    rng = np.random.default_rng(4)
    prompt = rng.integers(3, 97, 11).astype(np.int32)
    tails = samples([5, 9, 7], 6)
    full = [
        (np.concatenate([prompt, ids]), np.concatenate([np.zeros(11, np.float32), w])) for ids, w in tails
    ]
    for checkpointing in (False, True):
        made = engine(family(name), gradient_checkpointing=checkpointing)
        loss, grad = run(made, batch([[s] for s in full], 24))
        ours, ours_grad = run(made, prefixed(tails, prompt, 12))
        assert abs(ours - loss) <= 1e-5 * abs(loss)
        assert relative(ours_grad, grad) < 1e-4


def test_prefixes_of_other_lengths_are_not_traced_again(family):
    """They are padded to a few widths, and how long they really are is an argument."""
    made = engine(family("llama"))
    tails = samples([5, 9], 6)
    results = {}
    for length in (7, 11, 20):
        prompt = np.random.default_rng(length).integers(3, 97, length).astype(np.int32)
        results[length] = run(made, prefixed(tails, prompt, 12))
        full = [
            (np.concatenate([prompt, i]), np.concatenate([np.zeros(length, np.float32), w])) for i, w in tails
        ]
        loss, grad = run(engine(family("llama")), batch([[s] for s in full], 40))
        assert results[length][0] == pytest.approx(loss, rel=1e-5)
        assert relative(results[length][1], grad) < 1e-4
    assert len(made._compiled) == 1


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text", "phi3"])
def test_checkpointing_changes_nothing_but_this_engine(family, name):
    packed = rows_for(name)
    plain = run(engine(family(name)), packed)
    again = run(engine(family(name), gradient_checkpointing=True), packed)
    assert again[0] == pytest.approx(plain[0], rel=1e-6)
    assert relative(again[1], plain[1]) < 1e-6
    after = engine(family(name))  # mlx-lm's own way patches the class for the whole process
    assert not any(type(layer).__name__.startswith("Checkpointed") for layer in after._model.layers)


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
    leaves = {n: torch.nn.Parameter(torch.from_numpy(v.copy())) for n, v in made.state().parameters.items()}
    theirs = torch.optim.AdamW(leaves.values(), lr=1e-2, weight_decay=0.01)
    for seed in range(3):
        sums = made.forward_backward(batch([samples([9, 14], seed)], 32), LOSS)
        for name, value in zip(made._shapes, made._gradient, strict=True):
            leaves[name].grad = torch.from_numpy(np.array(value)) / sums["weight"]
        norm = torch.nn.utils.clip_grad_norm_(leaves.values(), 1.0)
        theirs.step()
        report = made.optim_step(1e-2, sums["weight"])
        assert report.gradient_norm == pytest.approx(float(norm), rel=1e-5)
    for name, value in made.state().parameters.items():
        np.testing.assert_allclose(value, leaves[name].detach().numpy(), rtol=1e-4, atol=2e-6)


def test_other_learning_rates_are_not_traced_again(family):
    made = engine(family("llama"))
    packed = batch([samples([9, 14])], 32)
    traced = 0
    original = mx.sqrt

    def counting(x):
        nonlocal traced
        traced += 1
        return original(x)

    made.optim_step(1e-3, made.forward_backward(packed, LOSS)["weight"])
    mx.sqrt = counting
    try:
        for rate in (2e-3, 3e-3, 4e-3):
            made.optim_step(rate, made.forward_backward(packed, LOSS)["weight"])
    finally:
        mx.sqrt = original
    assert traced == 0


@pytest.mark.parametrize("gradient", [False, True])
def test_the_head_holds_few_chunks_of_logits(gradient):
    from instep.engines.mlx.head import site_logprob

    mx.set_default_device(mx.cpu)
    sites, width, vocabulary, chunk = 4096, 16, 8192, 64
    weight = mx.random.normal((vocabulary, width))
    hidden, label = mx.random.normal((sites, width)), mx.arange(sites) * 2
    mx.eval(weight, hidden, label)
    mx.reset_peak_memory()
    before = mx.get_active_memory()

    def total(h):
        return site_logprob(lambda x: x @ weight.T, h, label, 1.0, chunk, gradient)[0].sum()

    mx.eval(mx.grad(total)(hidden) if gradient else total(hidden))
    # MLX runs some ten operations ahead on a CPU: a few chunks of logits, never all 64.
    assert mx.get_peak_memory() - before < 18 * chunk * vocabulary * 4


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_the_head_equals_log_softmax_in_values_and_gradients(temperature, softcap):
    from instep.engines.mlx.head import site_logprob

    mx.set_default_device(mx.cpu)
    weight, hidden = mx.random.normal((11, 6)), mx.random.normal((20, 6))
    label, share = mx.random.randint(0, 11, (20,)), mx.random.uniform(shape=(20,))

    def head(x):
        logits = x @ weight.T
        return logits if softcap is None else mx.tanh(logits / softcap) * softcap

    def naive(h):
        logits = head(h) / temperature
        logprob = mx.take_along_axis(logits, label[:, None], -1)[:, 0] - mx.logsumexp(logits, -1)
        return (logprob * share).sum(), logprob, mx.argmax(logits, -1) == label

    def ours(h):
        logprob, correct = site_logprob(head, h, label, temperature, 7, True)
        return (logprob * share).sum(), logprob, correct

    (_, expected, right), expected_grad = mx.value_and_grad(naive)(hidden)
    (_, logprob, correct), grad = mx.value_and_grad(ours)(hidden)
    np.testing.assert_allclose(np.array(logprob), np.array(expected), atol=1e-5)
    np.testing.assert_allclose(np.array(grad), np.array(expected_grad), atol=1e-5)
    assert np.array_equal(np.array(correct), np.array(right))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("offset", [0, 37])
def test_attention_in_blocks_equals_the_whole_square(masked, offset):
    """Several blocks of queries, grouped heads, a prefix, and a mask that hides some of what is behind."""
    from instep.engines.mlx.attention import block_attention

    mx.set_default_device(mx.cpu)
    length = 600
    q = mx.random.normal((2, 6, length, 8))
    k, v = (mx.random.normal((2, 2, length + offset, 8)) for _ in range(2))
    cotangent = mx.random.normal((2, 6, length, 8))
    column, row = mx.arange(length + offset)[None], mx.arange(length)[:, None] + offset
    whole = column <= row
    if masked:
        whole = mx.stack([whole & (column % 3 > 0) | (column == row), whole & (row - column < 50)])[:, None]

    def blocks(q, k, v):
        def mask_of(a, b):
            return whole[..., a:b, : offset + b] if masked else None

        return (block_attention(q, k, v, 0.3, mask_of) * cotangent).sum()

    def square(q, k, v):
        return (mx.fast.scaled_dot_product_attention(q, k, v, scale=0.3, mask=whole) * cotangent).sum()

    ours, ours_grad = mx.value_and_grad(blocks, argnums=(0, 1, 2))(q, k, v)
    theirs, theirs_grad = mx.value_and_grad(square, argnums=(0, 1, 2))(q, k, v)
    assert float(ours.item()) == pytest.approx(float(theirs.item()), rel=1e-4, abs=1e-2)
    for a, b in zip(ours_grad, theirs_grad, strict=True):
        assert relative(np.array(a), np.array(b)) < 1e-5


def test_routing_leaves_other_users_of_mlx_lm_alone(family):
    from mlx_lm.models.cache import KVCache

    made = engine(family("llama"))
    cache = [KVCache() for _ in made._model.layers]
    tokens = mx.array([[5, 6, 7, 8, 9]])
    plain = made._model(tokens)
    cached = mx.concatenate(
        [made._model(tokens[:, :3], cache=cache), made._model(tokens[:, 3:], cache=cache)], 1
    )
    np.testing.assert_allclose(np.array(cached), np.array(plain), atol=1e-4)
