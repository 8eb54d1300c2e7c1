"""Fused = adapter on (invariant 10), and what rounding does to a small adapter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from instep.adapters import load_adapter, save_adapter
from instep.config import ModelSettings
from instep.engines.base import EngineState
from instep.errors import InputError
from instep.publishing.fuse import fuse, weight_of
from instep.publishing.tensors import TensorFile, as_float32, from_float32
from instep.publishing.verify import verify


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.bfloat16, "BF16"), (torch.float16, "F16"), (torch.float32, "F32")]
)
def test_types_are_those_of_torch(dtype: torch.dtype, name: str, tmp_path: Path) -> None:
    special = torch.tensor([0.0, -0.0, 1e-42, 1.0 + 2**-8, 1.0 + 3 * 2**-9, 65504.0, 3e38, float("inf")])
    values = torch.cat([special, torch.randn(500) * 3, torch.randn(500) * 1e-6])
    ours = from_float32(values.numpy(), name)
    theirs = values.to(dtype)
    assert ours.tobytes() == theirs.view(torch.uint8).numpy().tobytes()
    assert np.array_equal(as_float32(ours, name), theirs.float().numpy())
    save_file({"x": theirs.view(2, -1), "n": torch.arange(3)}, tmp_path / "a.safetensors")
    opened = TensorFile(tmp_path / "a.safetensors")
    assert np.array_equal(opened.float32("x"), theirs.view(2, -1).float().numpy())


def _adapter(folder: Path, source: Path, change: Any) -> Path:
    matrices, settings = load_adapter(source)
    state = EngineState({name: change(name, value) for name, value in matrices.items()}, {}, {}, 0)
    return save_adapter(folder, state, settings, "base")


@pytest.mark.parametrize("precision", ["auto", "float32", "bfloat16"])
def test_the_fused_model_is_the_adapted_one(
    trained_run: Path, tiny_model: Path, tmp_path: Path, precision: str
) -> None:
    target = tmp_path / "fused"
    report = fuse(tiny_model, trained_run / "adapter", target, precision, allow_loss=True)
    # The tiny model is stored in float32.
    assert report.layers == 14 and report.precision == {"auto": "float32"}.get(precision, precision)
    model = ModelSettings(path=str(tiny_model), precision="float32")
    check = verify(model, tiny_model, trained_run, target, "torch", report.precision)
    assert check.adapter_effect > 0.05
    if precision == "bfloat16":
        assert check.mean_difference < 0.05 and 0.9 < report.survived < 1.1
        assert json.loads((target / "config.json").read_text())["dtype"] == "bfloat16"
    else:
        assert check.largest_difference < 1e-4 and report.survived == pytest.approx(1, abs=1e-5)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded: Any = AutoModelForCausalLM.from_pretrained(target)
    assert str(loaded.dtype) == f"torch.{report.precision}"
    assert AutoTokenizer.from_pretrained(target).chat_template
    assert (target / "generation_config.json").is_file() == (tiny_model / "generation_config.json").is_file()


def test_fused_is_what_peft_makes_of_it(trained_run: Path, tiny_model: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    fuse(tiny_model, trained_run / "adapter", tmp_path / "fused")
    base: Any = AutoModelForCausalLM.from_pretrained(tiny_model)
    merged = PeftModel.from_pretrained(base, str(trained_run / "adapter")).merge_and_unload()  # type: ignore
    ours = load_file(tmp_path / "fused" / "model.safetensors")
    theirs = merged.state_dict()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-5, atol=1e-6)


def test_a_wrong_model_does_not_pass_the_check(trained_run: Path, tiny_model: Path, tmp_path: Path) -> None:
    """The fused adapter has its sign turned: the comparison must see it."""
    turned = _adapter(tmp_path / "turned", trained_run / "adapter", lambda n, v: -v if "lora_B" in n else v)
    fuse(tiny_model, turned, tmp_path / "fused")
    model = ModelSettings(path=str(tiny_model), precision="float32")
    with pytest.raises(InputError, match="does not say what the adapter says"):
        verify(model, tiny_model, trained_run, tmp_path / "fused", "torch", "float32")


def test_an_adapter_that_rounding_erases_is_refused(
    trained_run: Path, tiny_model: Path, tmp_path: Path
) -> None:
    small = _adapter(
        tmp_path / "small", trained_run / "adapter", lambda n, v: v * 1e-5 if "lora_B" in n else v
    )
    rounded = tmp_path / "base16"
    shutil.copytree(tiny_model, rounded)
    weights = load_file(rounded / "model.safetensors")
    save_file({name: value.bfloat16() for name, value in weights.items()}, rounded / "model.safetensors")
    with pytest.raises(InputError, match=r"only \d+% of the adapter would survive rounding to bfloat16"):
        fuse(rounded, small, tmp_path / "fused")
    assert not list(tmp_path.glob("fused*"))
    assert fuse(rounded, small, tmp_path / "wide", "float32").survived == pytest.approx(1, abs=1e-2)
    assert fuse(rounded, small, tmp_path / "lossy", allow_loss=True).survived < 0.9


def test_wrong_input_is_named_and_leaves_nothing(trained_run: Path, tiny_model: Path, tmp_path: Path) -> None:
    adapter = trained_run / "adapter"
    zero = _adapter(tmp_path / "zero", adapter, lambda n, v: v * 0 if "lora_B" in n else v)
    with pytest.raises(InputError, match="adds nothing"):
        fuse(tiny_model, zero, tmp_path / "fused")
    huge = _adapter(tmp_path / "huge", adapter, lambda n, v: v * 1e6)
    with pytest.raises(InputError, match="not finite in F16"):
        fuse(tiny_model, huge, tmp_path / "fused", "float16")
    foreign = _adapter(tmp_path / "foreign", adapter, lambda n, v: v)
    weights = (foreign / "adapter_model.safetensors").read_bytes()
    (foreign / "adapter_model.safetensors").write_bytes(weights.replace(b"layers.1.mlp", b"layers.7.mlp"))
    with pytest.raises(InputError, match=r"layers.7.mlp.\w+ is not in the model's files"):
        fuse(tiny_model, foreign, tmp_path / "fused")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine").write_text("x")
    with pytest.raises(InputError, match="not empty"):
        fuse(tiny_model, adapter, tmp_path / "taken")
    assert not list(tmp_path.glob("fused*")) and (tmp_path / "taken" / "mine").read_text() == "x"


def test_names_with_another_prefix_are_found() -> None:
    names = {"language_model.model.layers.0.q_proj.weight", "layers.1.q_proj.weight"}
    assert weight_of("model.layers.0.q_proj", names) == "language_model.model.layers.0.q_proj.weight"
    assert weight_of("model.layers.1.q_proj", names) == "layers.1.q_proj.weight"


def test_sharded_models_stay_sharded(trained_run: Path, tiny_model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    sharded = tmp_path / "sharded"
    shutil.copytree(tiny_model, sharded)
    (sharded / "model.safetensors").unlink()
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model)
    model.save_pretrained(sharded, max_shard_size="40KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    fuse(sharded, trained_run / "adapter", tmp_path / "fused", "float16", allow_loss=True)
    index = json.loads((tmp_path / "fused" / "model.safetensors.index.json").read_text())
    files = list((tmp_path / "fused").glob("*.safetensors"))
    assert {file.name for file in files} == set(index["weight_map"].values())
    assert index["metadata"]["total_size"] == sum(
        entry.end - entry.start for file in files for entry in TensorFile(file).entries.values()
    )
    fuse(tiny_model, trained_run / "adapter", tmp_path / "whole", "float16", allow_loss=True)
    parts: dict[str, torch.Tensor] = {}
    for file in files:
        parts |= load_file(file)
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    assert whole.keys() == parts.keys() and all(torch.equal(parts[name], whole[name]) for name in whole)


def test_the_command(instep: Any, trained_run: Path, tmp_path: Path) -> None:
    done = instep("fuse", trained_run, "-o", "fused")
    assert (
        "fused 14 layers into float32" in done.stdout and "differ from those with the adapter" in done.stdout
    )
    result = json.loads(instep("fuse", trained_run, "-o", "again", "--no-check", "--json").stdout)
    assert result["check"] is None and result["survived"] == pytest.approx(1, abs=1e-5)
    assert "not empty" in instep("fuse", trained_run, "-o", "again", check=2).stderr
    assert "expected auto" in instep("fuse", trained_run, "-o", "x", "--precision", "int4", check=2).stderr
    asked = ("Count to 3", "--temperature", "0", "--max-new-tokens", "12", "--set", "model.precision=float32")
    plain = instep("generate", *asked, "--model", "fused")
    assert plain.stdout == instep("generate", *asked, "--adapter", trained_run).stdout
