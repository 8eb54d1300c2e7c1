"""Loading, attention, adapters and the head against transformers, PEFT and plain torch."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from batches import batch, engine, samples

from instep.config import AdapterSettings, ModelSettings, OptimizerSettings
from instep.engines.torch.engine import TorchEngine
from instep.engines.torch.head import site_logprob
from instep.errors import InputError
from instep.objectives import CrossEntropy


def reference(folder, rows, adapter=None):
    """Log-probabilities at the supervised tokens by transformers' eager attention, each sample alone."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter)
    out = []
    for ids, weight in (s for row in rows for s in row):
        with torch.no_grad():
            logits = model(torch.from_numpy(ids).long()[None]).logits[0]
        logprob = torch.log_softmax(logits, -1)
        out += [float(logprob[t - 1, ids[t]]) for t in np.flatnonzero(weight)]
    return np.array(out)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "phi3", "gemma3_text", "gemma2"])
def test_attention_equals_eager(family, name):
    rows = [samples([9, 30]), samples([41], 2)]
    made = engine(family(name), warm=False)
    ours = made.score(batch(rows, 48, sites=64))
    theirs = reference(family(name), rows)
    np.testing.assert_allclose(ours.logprob[: len(theirs)], theirs, atol=2e-5)


@pytest.mark.parametrize("window", [None, 300])
def test_long_rows_equal_sdpa_in_values_and_gradients(window):
    """More tokens than a block of queries has, over three spans and a shared prefix."""
    from instep.engines.torch.attention import Plan, _naive, attend
    from instep.engines.torch.layout import Layout, Span

    torch.manual_seed(0)
    n = 1500
    spans = (Span(0, 400), Span(400, 1100, 400), Span(1100, 1500, 400))
    empty = np.zeros(0, np.int32)
    plan = Plan(Layout(empty, empty, empty, spans, 400))
    q, k, v = (torch.randn(1, h, n, 8, requires_grad=True) for h in (6, 2, 2))
    cotangent = torch.randn(1, n, 6, 8)
    results = []
    for output in (
        attend(None, q, k, v, None, 0.3, window, plan=plan)[0],
        _naive(q, k, v, plan, 0.3, window, None),
    ):
        results.append([output.detach(), *torch.autograd.grad((output * cotangent).sum(), (q, k, v))])
    for ours, theirs in zip(*results, strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < 1e-5


def test_bfloat16_attention_is_as_close_to_float32_as_the_stock_one():
    from instep.engines.torch.attention import Tile
    from instep.engines.torch.blocks import block_attention

    torch.manual_seed(0)
    q, k, v = (torch.randn(700, h, 16).mul_(2).to(torch.bfloat16) for h in (6, 2, 2))
    cotangent = torch.randn(700, 6, 16)

    def grads(function, dtype):
        leaves = [x.to(dtype).requires_grad_(True) for x in (q, k, v)]
        (function(*leaves).float() * cotangent).sum().backward()
        return [x.grad.float() for x in leaves]

    def stock(q, k, v):
        heads = [x.transpose(0, 1)[None] for x in (q, k, v)]
        o = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return o[0].transpose(0, 1)

    exact = grads(stock, torch.float32)
    ours = grads(lambda q, k, v: block_attention(q, k, v, [Tile(0, 700, 0, 700)], 16**-0.5), torch.bfloat16)
    theirs = grads(stock, torch.bfloat16)
    for a, b, c in zip(ours, theirs, exact, strict=True):
        assert float((a - c).norm() / c.norm()) < max(0.01, 2 * float((b - c).norm() / c.norm()))


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("trainable", [False, True])
def test_head_equals_log_softmax(softcap, trainable):
    torch.manual_seed(0)
    hidden = torch.randn(20, 6, requires_grad=True)
    weight = torch.randn(11, 6, requires_grad=trainable)
    label = torch.randint(0, 11, (20,))
    share = torch.rand(20)

    def naive():
        logits = hidden @ weight.t()
        if softcap:
            logits = torch.tanh(logits / softcap) * softcap
        return torch.log_softmax(logits / 0.7, -1).gather(1, label[:, None])[:, 0], logits.argmax(-1) == label

    leaves = [hidden, weight] if trainable else [hidden]
    results = []
    for logprob, correct in (naive(), site_logprob(hidden, weight, None, label, 0.7, softcap, 7)):
        results.append(
            [logprob.detach(), correct.float(), *torch.autograd.grad((logprob * share).sum(), leaves)]
        )
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_the_reference_model_is_the_base(family):
    packed = batch([samples([9, 30])], 48)
    warm, cold = engine(family("llama")), engine(family("llama"), warm=False)
    base = cold.score(packed).logprob
    np.testing.assert_allclose(warm.score(packed, adapter=False).logprob, base, atol=1e-6)
    assert np.abs(warm.score(packed).logprob - base).max() > 1e-3


def test_full_fine_tuning_reaches_every_parameter(family):
    made = TorchEngine()
    report = made.load(
        ModelSettings(path=str(family("llama")), precision="float32", device="cpu"),
        AdapterSettings(kind="full"),
        OptimizerSettings(),
        0,
    )
    assert report.trainable_parameters == report.parameters
    before = made.state().parameters
    packed = batch([samples([9, 30])], 48)
    losses = []
    for _ in range(8):
        sums = made.forward_backward(packed, CrossEntropy())
        losses.append(sums["loss"])
        made.optim_step(1e-2, sums["weight"])
    after = made.state()
    assert losses[-1] < 0.7 * losses[0]
    assert all(not np.array_equal(after.parameters[n], before[n]) for n in before)
    resumed = TorchEngine()
    resumed.load(
        ModelSettings(path=str(family("llama")), precision="float32", device="cpu"),
        AdapterSettings(kind="full"),
        OptimizerSettings(),
        0,
    )
    resumed.load_state(after)
    np.testing.assert_array_equal(resumed.score(packed).logprob, made.score(packed).logprob)


def test_full_gradient_equals_autograd(family):
    from transformers import AutoModelForCausalLM

    rows = [samples([9, 30])]
    made = TorchEngine()
    settings = ModelSettings(path=str(family("llama")), precision="float32", device="cpu")
    made.load(settings, AdapterSettings(kind="full"), OptimizerSettings(), 0)
    made.forward_backward(batch(rows, 48), CrossEntropy())
    model = AutoModelForCausalLM.from_pretrained(
        family("llama"), dtype=torch.float32, attn_implementation="eager"
    )
    loss = torch.zeros(())
    for ids, weight in rows[0]:
        logprob = torch.log_softmax(model(torch.from_numpy(ids).long()[None]).logits[0], -1)
        for t in np.flatnonzero(weight):
            loss = loss - float(weight[t]) * logprob[t - 1, ids[t]]
    loss.backward()
    for name, parameter in model.named_parameters():
        ours = made._trainables.view(made._trainables.gradient, name)
        assert float((ours - parameter.grad).norm() / parameter.grad.norm()) < 1e-4, name


def test_sixteen_bit_base_keeps_float32_masters(family):
    made = engine(family("llama"), warm=False, precision="bfloat16")
    assert all(v.dtype == np.float32 for v in made.state().parameters.values())
    packed = batch([samples([9, 30])], 48)
    first = None
    for _ in range(20):
        sums = made.forward_backward(packed, CrossEntropy())
        first = first or sums["loss"]
        made.optim_step(1e-2, sums["weight"])
    assert sums["loss"] < 0.8 * first


def test_wrong_targets_list_the_right_ones(family):
    with pytest.raises(InputError, match=r"q_proj.*down_proj, gate_up_proj, o_proj, qkv_proj"):
        TorchEngine().load(
            ModelSettings(path=str(family("phi3")), device="cpu"), AdapterSettings(), OptimizerSettings(), 0
        )


def test_what_is_not_a_model_is_one_clear_line(family, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "config.json").write_text("{")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "config.json").write_text(json.dumps({"model_type": "no-such-type"}))
    (tmp_path / "foreign" / "model.safetensors").write_bytes(b"nothing")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_bytes((family("llama") / "config.json").read_bytes())
    (broken / "model.safetensors").write_bytes(b"nothing")
    for name in ("missing", "empty", "torn", "foreign", "broken"):
        with pytest.raises(InputError) as caught:
            TorchEngine().load(
                ModelSettings(path=str(tmp_path / name)), AdapterSettings(), OptimizerSettings(), 0
            )
        assert "\n" not in str(caught.value) and name in str(caught.value)


def test_foreign_state_and_ids_are_refused(family):
    made = engine(family("llama"))
    with pytest.raises(InputError, match="missing"):
        state = made.state()
        state.parameters.pop(next(iter(state.parameters)))
        made.load_state(state)
    narrow = made.state()
    name = next(iter(narrow.parameters))
    narrow.exp_avg[name] = narrow.exp_avg[name][:1]
    with pytest.raises(InputError, match="shape"):
        made.load_state(narrow)
    packed = batch([samples([9])], 16)
    packed.tokens[0, 0] = 97
    with pytest.raises(InputError, match="vocabulary"):
        made.score(packed)
