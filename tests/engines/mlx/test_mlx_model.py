"""Loading on MLX: settings that mlx-lm does not read, quantized bases, refusals."""

from __future__ import annotations

import json
import shutil

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from batches import batch, relative, samples
from mlx_engines import engine, gradient

from instep.config import AdapterSettings, ModelSettings, OptimizerSettings
from instep.engines.mlx import loading
from instep.engines.mlx.engine import MlxEngine
from instep.errors import InputError
from instep.objectives import CrossEntropy


def rewritten(folder, tmp_path, **changes):
    copy = tmp_path / folder.name
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | changes))
    return copy


def test_the_rotary_base_of_transformers_5_is_read(family, tmp_path):
    """mlx-lm takes 10,000 for llama whatever `rope_parameters` says."""
    from batches import engine as torch_engine

    changed = rewritten(
        family("llama"), tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 50.0}
    )
    rows = batch([samples([41], 2)], 48)
    expected = torch_engine(changed, warm=False).score(rows).logprob
    np.testing.assert_allclose(engine(changed, warm=False).score(rows).logprob, expected, atol=1e-4)
    assert np.abs(engine(family("llama"), warm=False).score(rows).logprob - expected).max() > 1e-2


def test_llama_3_scaling_is_read(family, tmp_path):
    from batches import engine as torch_engine

    scaling = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    changed = rewritten(family("llama"), tmp_path, rope_parameters=scaling)
    rows = batch([samples([41], 2)], 48)
    expected = torch_engine(changed, warm=False).score(rows).logprob
    np.testing.assert_allclose(engine(changed, warm=False).score(rows).logprob, expected, atol=1e-4)


def test_rope_settings_of_two_kinds_of_layers():
    nested = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert loading.rope_settings({"rope_parameters": nested}) == {
        "rope_theta": 1e6,
        "rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 8.0},
        "rope_local_base_freq": 1e4,
    }
    assert loading.rope_settings({"rope_theta": 5.0}) == {}
    with pytest.raises(InputError, match="chunked_attention"):
        loading.rope_settings({"rope_parameters": nested | {"chunked_attention": {"rope_theta": 1.0}}})


def test_layer_types_become_a_pattern_or_an_error():
    sliding, full = "sliding_attention", "full_attention"
    assert loading.window_pattern({"layer_types": [sliding, sliding, full, sliding]}) == {
        "sliding_window_pattern": 3
    }
    with pytest.raises(InputError, match="no pattern"):
        loading.window_pattern({"layer_types": [full, sliding, full]})


def test_a_window_that_mlx_lm_leaves_out_is_an_error_not_a_wrong_number(family):
    made = engine(family("gemma2"))
    with pytest.raises(InputError, match=r"sliding window of 6.*rendering.max_length"):
        made.score(batch([samples([41], 2)], 48))
    from instep.engines.base import Sampling

    with pytest.raises(InputError, match=r"max_new_tokens"):
        made.generate([np.arange(5, 9, dtype=np.int32)], 1, Sampling(30))


@pytest.mark.parametrize("form", ["4bit", "8bit"])
def test_a_quantized_base_trains(family, tmp_path, form):
    wide = models_wide(tmp_path)
    made = engine(wide, warm=False, quantization=form)
    quantized = [m for m in made._model.modules() if isinstance(m, nn.QuantizedLinear)]
    assert len(quantized) == 14
    packed = batch([samples([9, 14])], 32)
    first = None
    for _ in range(20):
        sums = made.forward_backward(packed, CrossEntropy())
        first = first or sums["loss"]
        made.optim_step(2e-2, sums["weight"])
    assert sums["loss"] < 0.7 * first
    assert "made float" in made.choices["quantization"]


def test_products_made_float_equal_the_quantized_ones(family, tmp_path, monkeypatch):
    wide = models_wide(tmp_path)
    packed = batch([samples([9, 14])], 32)
    results = []
    for keep in (False, True):
        if keep:
            monkeypatch.setattr(loading, "dequantize_products", lambda model: 0)
        made = engine(wide, quantization="4bit")
        results.append((made.forward_backward(packed, CrossEntropy())["loss"], gradient(made)))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
    assert relative(results[0][1], results[1][1]) < 1e-4


def models_wide(tmp_path):
    import models

    return models.make("llama", tmp_path, hidden_size=64, intermediate_size=128, head_dim=16)


def test_a_stored_quantized_model_loads_as_it_is(tmp_path):
    from mlx_lm.utils import load_model, quantize_model, save_config, save_model

    wide = models_wide(tmp_path / "float")
    model, config = load_model(wide)
    model, config = quantize_model(model, config, 64, 4)
    stored = tmp_path / "llama"
    stored.mkdir()
    save_model(stored, model)
    save_config(config, stored / "config.json")
    made = engine(stored, warm=False)
    assert made.choices["quantization"].startswith("as stored, 4 bits")
    same = engine(wide, warm=False, quantization="4bit")
    packed = batch([samples([9, 14])], 32)
    np.testing.assert_allclose(made.score(packed).logprob, same.score(packed).logprob, atol=1e-5)
    with pytest.raises(InputError, match="stored with 4 bits"):
        engine(stored, warm=False, quantization="8bit")


def test_the_reference_model_is_the_base(family):
    packed = batch([samples([9, 30])], 48)
    warm, cold = engine(family("llama")), engine(family("llama"), warm=False)
    base = cold.score(packed).logprob
    np.testing.assert_allclose(warm.score(packed, adapter=False).logprob, base, atol=1e-6)
    assert np.abs(warm.score(packed).logprob - base).max() > 1e-3


def test_wrong_targets_list_the_right_ones(family):
    with pytest.raises(InputError, match=r"q_proj.*down_proj, gate_up_proj, o_proj, qkv_proj"):
        MlxEngine().load(
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
            MlxEngine().load(
                ModelSettings(path=str(tmp_path / name)), AdapterSettings(), OptimizerSettings(), 0
            )
        assert "\n" not in str(caught.value) and name in str(caught.value)


def test_a_model_that_keeps_more_than_keys_and_values_is_refused(tmp_path):
    """A state-space model: packed rows would flow into each other."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "mamba", vocab_size=97, hidden_size=32, num_hidden_layers=2, state_size=4, intermediate_size=64
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "mamba")
    with pytest.raises(InputError, match=r"mamba.*use another engine"):
        MlxEngine().load(
            ModelSettings(path=str(tmp_path / "mamba"), device="cpu"),
            AdapterSettings(target_modules=("in_proj",)),
            OptimizerSettings(),
            0,
        )


def test_foreign_state_and_ids_are_refused(family):
    made = engine(family("llama"))
    narrow = made.state()
    name = next(iter(narrow.parameters))
    narrow.exp_avg[name] = narrow.exp_avg[name][:1]
    with pytest.raises(InputError, match="shape"):
        made.load_state(narrow)
    packed = batch([samples([9])], 16)
    packed.tokens[0, 0] = 97
    with pytest.raises(InputError, match="vocabulary"):
        made.score(packed)


def test_choices_of_device_and_precision():
    device, reason = loading.choose_device("auto")
    if not loading.is_gpu(device):
        assert reason == "MLX finds no GPU"
        with pytest.raises(InputError, match="device 'gpu' is not on this machine"):
            loading.choose_device("gpu")
        assert loading.choose_precision("auto", device)[0] == mx.float32
    assert loading.choose_precision("auto", mx.Device(mx.gpu))[0] == mx.bfloat16


def test_the_reports_of_memory(family):
    made = engine(family("llama"))
    made.reset_peak()
    made.forward_backward(batch([samples([9, 14])], 32), CrossEntropy())
    report = made.memory()
    assert 0 < report.live_bytes <= report.peak_bytes and report.live_bytes <= report.driver_bytes
