"""The GRPO objectives against a plain per-sequence implementation, in numpy and in torch."""

import math

import numpy as np
import pytest

from instep.objectives import CrossEntropy, Grpo, add_metrics, loss_weights

VARIANTS = ("grpo", "bnpo", "dapo", "dr_grpo", "gspo")
MAX_TOKENS = 9


def make(variant, seed=0, beta=0.1, dtype=np.float64):
    """Sequences of different length, one masked out, with padding sites between; ratios on both sides of the clip."""
    random = np.random.default_rng(seed)
    lengths = [3, 7, 0, 1, 5]
    token_weight, denominator = loss_weights(variant, lengths, MAX_TOKENS)
    sequence = np.concatenate([np.full(max(n, 2), s) for s, n in enumerate(lengths)])
    weight = np.concatenate([[token_weight[s]] * n + [0.0] * (max(n, 2) - n) for s, n in enumerate(lengths)])
    sites = len(sequence)
    logprob = -random.exponential(2.0, sites)
    fields = {
        "weight": weight.astype(dtype),
        "sequence": sequence.astype(np.int32),
        "behaviour_logprob": (logprob + random.normal(0, 0.3, sites)).astype(dtype),
        "reference_logprob": (logprob + random.normal(0, 0.5, sites)).astype(dtype),
        "advantage": np.array([1.2, -0.7, 0.4, -1.5, 0.0])[sequence].astype(dtype),
    }
    objective = Grpo(variant, 0.2, 0.28, beta, sequences=len(lengths))
    return objective, logprob.astype(dtype), fields, denominator, lengths


def by_hand(variant, beta, logprob, fields, lengths):
    """The mean loss of a step as the papers write it: sequence by sequence, token by token."""
    losses = []
    for index, length in enumerate(lengths):
        if length == 0:
            continue
        rows = [k for k in np.flatnonzero(fields["sequence"] == index)][:length]
        logs = [logprob[k] - fields["behaviour_logprob"][k] for k in rows]
        terms = []
        for k, log in zip(rows, logs, strict=True):
            ratio = math.exp(sum(logs) / length if variant == "gspo" else log)
            advantage = fields["advantage"][k]
            gain = min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage)
            gap = fields["reference_logprob"][k] - logprob[k]
            terms.append(-gain + beta * (math.exp(gap) - gap - 1))
        losses.append(terms)
    if variant in ("grpo", "gspo"):
        return sum(sum(terms) / len(terms) for terms in losses) / len(losses)
    total = sum(sum(terms) for terms in losses)
    if variant == "dr_grpo":
        return total / (len(lengths) * MAX_TOKENS)
    return total / sum(lengths)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_the_mean_loss_is_the_papers(variant, beta):
    objective, logprob, fields, denominator, lengths = make(variant, beta=beta)
    loss, _ = objective(np, logprob, fields)
    assert loss / denominator == pytest.approx(by_hand(variant, beta, logprob, fields, lengths), rel=1e-12)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_gradient_in_torch_is_the_slope_of_the_loss(variant):
    torch = pytest.importorskip("torch")
    objective, logprob, fields, _, _ = make(variant)
    tensors = {name: torch.from_numpy(value) for name, value in fields.items()}
    at = torch.tensor(logprob, requires_grad=True)
    loss, metrics = objective(torch, at, tensors)
    loss.backward()
    expected_loss, expected_metrics = objective(np, logprob, fields)
    assert float(loss.detach()) == pytest.approx(expected_loss, rel=1e-12)
    assert {name: float(value.detach()) for name, value in metrics.items()} == pytest.approx(
        expected_metrics, rel=1e-12
    )
    width = 1e-6
    for site in range(len(logprob)):
        step = np.zeros_like(logprob)
        step[site] = width
        slope = (objective(np, logprob + step, fields)[0] - objective(np, logprob - step, fields)[0]) / (
            2 * width
        )
        assert float(at.grad[site]) == pytest.approx(slope, rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("name", ["jax.numpy", "mlx.core"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_other_namespaces_agree(name, variant):
    xp = pytest.importorskip(name)
    objective, logprob, fields, _, _ = make(variant, dtype=np.float32)
    loss, metrics = objective(np, logprob, fields)
    other, others = objective(xp, xp.array(logprob), {key: xp.array(value) for key, value in fields.items()})
    assert float(other) == pytest.approx(float(loss), rel=1e-4)
    assert {key: float(value) for key, value in others.items()} == pytest.approx(
        {key: float(value) for key, value in metrics.items()}, rel=1e-4
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_padding_has_no_influence_even_where_it_would_overflow(variant):
    torch = pytest.importorskip("torch")
    objective, logprob, fields, _, _ = make(variant, dtype=np.float32)
    loss, metrics = objective(np, logprob, fields)
    padded = fields["weight"] == 0
    logprob[padded] = -500.0
    fields["reference_logprob"][padded] = 500.0
    fields["behaviour_logprob"][padded] = -1000.0
    at = torch.tensor(logprob, requires_grad=True)
    again, others = objective(torch, at, {name: torch.from_numpy(value) for name, value in fields.items()})
    again.backward()
    assert float(again.detach()) == pytest.approx(float(loss), rel=1e-6)
    assert {k: float(v.detach()) for k, v in others.items()} == pytest.approx(
        {k: float(v) for k, v in metrics.items()}, rel=1e-5
    )
    assert torch.isfinite(at.grad).all() and (at.grad[torch.from_numpy(padded)] == 0).all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_before_the_first_update_the_ratio_is_one_and_the_gradient_is_minus_weight_times_advantage(variant):
    torch = pytest.importorskip("torch")
    objective, logprob, fields, _, _ = make(variant, beta=0.0)
    fields["behaviour_logprob"] = logprob.copy()
    at = torch.tensor(logprob, requires_grad=True)
    loss, metrics = objective(torch, at, {name: torch.from_numpy(value) for name, value in fields.items()})
    loss.backward()
    np.testing.assert_allclose(
        at.grad.numpy(), -fields["weight"] * fields["advantage"], rtol=1e-12, atol=1e-15
    )
    assert float(metrics["ratio"]) == (fields["weight"] > 0).sum()
    assert float(metrics["max_log_ratio"]) == float(metrics["clip_low"]) == float(metrics["clip_high"]) == 0


def test_clipping_is_counted_where_it_takes_the_gradient_away():
    fields = {
        "weight": np.ones(7),
        "behaviour_logprob": np.zeros(7),
        "advantage": np.array([1.0, -1.0, 1.0, -1.0, 1.0, -1.0, -1.0]),
    }
    logprob = np.log([1.5, 1.5, 0.5, 0.5, 1.25, 0.85, 0.6])
    loss, metrics = Grpo("dapo", 0.2, 0.28)(np, logprob, fields)
    assert (metrics["clip_high"], metrics["clip_low"]) == (1, 2)
    assert loss == pytest.approx(-1.28 + 1.5 - 0.5 + 0.8 - 1.25 + 0.85 + 0.8)
    assert metrics["max_log_ratio"] == pytest.approx(math.log(2))


def test_kl_is_zero_at_the_reference_and_positive_elsewhere():
    objective, logprob, fields, _, _ = make("grpo", beta=0.5)
    assert objective(np, logprob, fields | {"reference_logprob": logprob})[1]["kl"] == 0
    assert objective(np, logprob, fields)[1]["kl"] > 0


def test_a_step_does_not_depend_on_how_it_is_cut_into_batches():
    for variant in VARIANTS:
        objective, logprob, fields, _, _ = make(variant)
        whole, metrics = objective(np, logprob, fields)
        total, sums = 0.0, {}
        for group in ([0, 3], [1, 2, 4]):
            rows = np.isin(fields["sequence"], group)
            loss, part = objective(np, logprob[rows], {name: value[rows] for name, value in fields.items()})
            total += loss
            sums = add_metrics(sums, part)
        assert total == pytest.approx(whole, rel=1e-12)
        assert sums == pytest.approx(metrics, rel=1e-12)


def test_bnpo_normalises_by_what_a_rank_holds():
    weight, denominator = loss_weights("bnpo", [2, 4, 3], 8, rank=[0, 0, 1])
    np.testing.assert_allclose(weight / denominator, [1 / 12, 1 / 12, 1 / 6])
    alone, whole = loss_weights("bnpo", [2, 4, 3], 8), loss_weights("dapo", [2, 4, 3], 8)
    np.testing.assert_allclose(alone[0] / alone[1], whole[0] / whole[1])


def test_a_step_without_any_trained_token_has_a_denominator():
    for variant in VARIANTS:
        weight, denominator = loss_weights(variant, [0, 0], 8)
        assert denominator > 0 and not weight.any()


def test_wrong_settings_are_refused():
    for bad in ({"variant": "ppo"}, {"epsilon_low": 1.5}, {"beta": -1.0}, {"variant": "gspo"}):
        with pytest.raises(ValueError):
            Grpo(**bad)
    with pytest.raises(ValueError, match="between 0 and 8"):
        loss_weights("grpo", [9], 8)


def test_an_objective_is_hashable_and_entropy_is_summed_where_given():
    assert hash(Grpo()) == hash(Grpo()) and hash(CrossEntropy()) != hash(Grpo(beta=0.1))
    objective, logprob, fields, _, _ = make("grpo")
    entropy = np.full(len(logprob), 2.0)
    _, metrics = objective(np, logprob, fields | {"entropy": entropy})
    assert metrics["entropy"] == 2.0 * (fields["weight"] > 0).sum()
