"""Adapters and models between Hugging Face's forms and mlx-lm's, against mlx-lm and transformers themselves."""

from __future__ import annotations

import json

import mlx.core as mx
import models
import numpy as np
import pytest
from batches import batch, samples
from mlx_engines import engine
from typer.testing import CliRunner

from instep.adapters import load_adapter, save_adapter
from instep.cli.app import app
from instep.config import AdapterSettings
from instep.engines.mlx import convert
from instep.errors import InputError

SETTINGS = AdapterSettings(rank=4, alpha=8.0)
PROBE = np.arange(3, 40, dtype=np.int32)


def logprob_of(model, packed) -> np.ndarray:
    """What an mlx-lm model gives at the sites of a batch of one row of one sample."""
    logits = model(mx.array(packed.tokens))[0].astype(mx.float32)
    table = np.array(logits - mx.logsumexp(logits, -1, keepdims=True))
    return table[packed.site, packed.label]


def test_an_adapter_goes_to_mlx_lm_and_back(family, tmp_path):
    from mlx_lm.tuner.utils import load_adapters
    from mlx_lm.utils import load_model

    from instep.engines.mlx.loading import rope_settings
    from instep.models import read_config

    made = engine(family("llama"))
    save_adapter(tmp_path / "peft", made.state(), SETTINGS, "some/base")
    done = CliRunner().invoke(
        app, ["adapter", "convert", str(tmp_path / "peft"), "-o", str(tmp_path / "mlx")]
    )
    assert done.exit_code == 0, done.output
    assert float(done.output.rsplit(maxsplit=1)[-1]) < 1e-12
    settings = rope_settings(read_config(str(family("llama"))))
    theirs, _ = load_model(family("llama"), model_config=settings)
    theirs = load_adapters(theirs, str(tmp_path / "mlx"))
    packed = batch([samples([24])], 24)
    np.testing.assert_allclose(logprob_of(theirs, packed), made.score(packed).logprob, atol=1e-4)
    assert np.abs(logprob_of(theirs, packed) - made.score(packed, adapter=False).logprob).max() > 1e-2

    done = CliRunner().invoke(
        app, ["adapter", "convert", str(tmp_path / "mlx"), "-o", str(tmp_path / "back"), "--json"]
    )
    assert json.loads(done.output)["form"] == "peft"
    before, after = load_adapter(tmp_path / "peft"), load_adapter(tmp_path / "back")
    assert before[0].keys() == after[0].keys()
    assert all(np.array_equal(before[0][name], after[0][name]) for name in before[0])
    assert (after[1].rank, after[1].alpha) == (4, 8.0)
    assert json.loads((tmp_path / "back" / "adapter_config.json").read_text())["base_model_name_or_path"] == (
        "some/base"
    )


def test_what_cannot_be_mapped_is_refused(family, tmp_path):
    from instep import adapters_mlx_lm

    made = engine(family("llama"))
    parameters = made.state().parameters
    without = {name: value for name, value in parameters.items() if "layers.0." not in name}
    with pytest.raises(InputError, match="same layers in every block"):
        adapters_mlx_lm.write(tmp_path / "mlx", without, SETTINGS, "")
    assert not (tmp_path / "mlx").exists()
    adapters_mlx_lm.write(tmp_path / "mlx", parameters, SETTINGS, "")
    config = tmp_path / "mlx" / "adapter_config.json"
    good = json.loads(config.read_text())
    for changes, message in (
        ({"fine_tune_type": "dora"}, "'dora', expected 'lora'"),
        ({"lora_parameters": {"rank": 4}}, "scale is missing"),
    ):
        config.write_text(json.dumps(good | changes))
        with pytest.raises(InputError, match=message):
            adapters_mlx_lm.read(tmp_path / "mlx")
    config.write_text("[1")
    done = CliRunner().invoke(app, ["adapter", "convert", str(tmp_path / "mlx"), "-o", str(tmp_path / "x")])
    assert isinstance(done.exception, InputError) and not (tmp_path / "x").exists()


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "phi3", "gemma3_text", "gemma2"])
def test_a_float_model_goes_to_mlx_and_back(family, tmp_path, name):
    """Back in transformers it gives what it gave; mlx-lm itself reads the converted one rightly."""
    import torch
    from transformers import AutoModelForCausalLM

    probe = PROBE[:5] if name == "gemma2" else PROBE
    done = convert.to_mlx(family(name), tmp_path / "mlx", None, probe)
    assert done.divergence < 1e-5
    back = convert.to_hugging_face(tmp_path / "mlx", tmp_path / "hf", probe)
    assert back.divergence < 1e-5
    logits = []
    for folder in (family(name), tmp_path / "hf"):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        with torch.no_grad():
            logits.append(model(torch.from_numpy(probe).long()[None]).logits)
    torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("form", [(4, 64, "affine"), (8, 32, "affine"), (4, 32, "mxfp4"), (4, 16, "nvfp4")])
def test_a_quantized_model_says_how_far_it_is(tmp_path, form):
    wide = models.make("llama", tmp_path, hidden_size=64, intermediate_size=128, head_dim=16)
    done = convert.to_mlx(wide, tmp_path / "mlx", convert.Quantization(*form), PROBE)
    assert 1e-6 < done.divergence < 1.0
    assert done.bits_per_weight < 11
    made = engine(tmp_path / "mlx", warm=False)
    assert f"as stored, {form[0]} bits" in made.choices["quantization"]
    packed = batch([samples([24])], 24)
    float_scores = engine(wide, warm=False).score(packed).logprob
    assert 0 < np.abs(made.score(packed).logprob - float_scores).max() < 3.0
    back = convert.to_hugging_face(tmp_path / "mlx", tmp_path / "hf", PROBE)
    assert back.divergence < 1e-3
    assert "quantization" not in json.loads((tmp_path / "hf" / "config.json").read_text())


def test_mixed_bits(tmp_path):
    wide = models.make(
        "llama", tmp_path, hidden_size=64, intermediate_size=128, head_dim=16, num_hidden_layers=8
    )
    four = convert.to_mlx(wide, tmp_path / "four", convert.Quantization(4, 64), PROBE)
    mixed = convert.to_mlx(
        wide, tmp_path / "mixed", convert.Quantization(4, 64, "affine", "mixed_4_6"), PROBE
    )
    assert four.bits_per_weight < mixed.bits_per_weight


def test_wrong_arguments_write_nothing(family, tmp_path):
    target = tmp_path / "out"
    for arguments, message in (
        (["--bits", "7"], "bits 7 with mode affine: expected 2, 3, 4, 5, 6, 8"),
        (["--mode", "mxfp4", "--group-size", "64"], "group size 64 with mode mxfp4: expected 32"),
        (["--to", "hf", "--bits", "4"], "--to hf writes float weights"),
        (["--to", "gguf"], "expected mlx or hf"),
        (["--group-size", "32"], "give --bits too"),
    ):
        done = CliRunner().invoke(app, ["convert", str(family("llama")), "-o", str(target), *arguments])
        assert isinstance(done.exception, InputError), arguments
        # The tiny model has no tokenizer: what is wrong with the arguments must be said before that.
        assert message in str(done.exception) or "tokenizer" in str(done.exception)
        assert not target.exists()
    with pytest.raises(InputError, match="bits 7"):
        convert.to_mlx(family("llama"), target, convert.Quantization(7, 64), PROBE)
    with pytest.raises(InputError, match=r"not a model that mlx-lm can load|no config\.json"):
        convert.to_mlx(tmp_path, target, None, PROBE)
    assert not target.exists()
