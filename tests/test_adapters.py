"""The adapter format on disk: PEFT reads what we write, and what we cannot read is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from instep.adapters import initial_adapter, load_adapter, lora_a_name, lora_b_name, save_adapter
from instep.config import AdapterSettings
from instep.engines.base import EngineState
from instep.errors import InputError

PINNED = 0.039691660553216934
SETTINGS = AdapterSettings(rank=3, alpha=6.0, target_modules=("q_proj",))


def state(value: float = 1.0) -> EngineState:
    a, b = lora_a_name("model.layers.0.self_attn.q_proj"), lora_b_name("model.layers.0.self_attn.q_proj")
    parameters = {a: np.full((3, 8), value, np.float32), b: np.full((5, 3), 2.0, np.float32)}
    return EngineState(parameters, {}, {}, 0)


def test_first_values_depend_on_seed_and_name_only():
    shapes = {"one.lora_A.weight": (16, 400), "two.lora_A.weight": (16, 400)}
    first = initial_adapter(shapes, 7)
    alone = initial_adapter({"two.lora_A.weight": (16, 400)}, 7)
    assert np.array_equal(first["two.lora_A.weight"], alone["two.lora_A.weight"])
    assert not np.array_equal(first["one.lora_A.weight"], first["two.lora_A.weight"])
    assert not np.array_equal(initial_adapter(shapes, 8)["one.lora_A.weight"], first["one.lora_A.weight"])
    value = first["one.lora_A.weight"]
    assert value.dtype == np.float32
    assert 0.049 < np.abs(value).max() <= 0.05  # 1 / √400
    assert value.std() == pytest.approx(0.05 / np.sqrt(3), rel=0.03)
    assert float(value[0, 0]) == pytest.approx(
        PINNED, abs=1e-9
    )  # other engines and later versions must agree


def test_round_trip(tmp_path):
    save_adapter(tmp_path / "a", state(), SETTINGS, "base")
    arrays, settings = load_adapter(tmp_path / "a")
    assert settings == SETTINGS
    assert all(np.array_equal(arrays[n], v) for n, v in state().parameters.items())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a"]


def test_nothing_is_overwritten_unless_asked(tmp_path):
    save_adapter(tmp_path / "a", state(), SETTINGS, "base")
    with pytest.raises(InputError, match="already holds an adapter"):
        save_adapter(tmp_path / "a", state(3.0), SETTINGS, "base")
    save_adapter(tmp_path / "a", state(3.0), SETTINGS, "base", replace=True)
    assert next(iter(load_adapter(tmp_path / "a")[0].values()))[0, 0] == 3.0


def test_what_is_not_finite_is_not_written(tmp_path):
    with pytest.raises(InputError, match="not finite"):
        save_adapter(tmp_path / "a", state(float("nan")), SETTINGS, "base")
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="cannot write"):
        save_adapter(tmp_path / "file" / "a", state(), SETTINGS, "base")


def _break(folder: Path, how: str) -> None:
    from safetensors.numpy import load_file, save_file

    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    arrays, content = load_file(weights), json.loads(config.read_text())
    name = next(iter(arrays))
    if how == "no file":
        weights.unlink()
        return
    if how == "torn":
        weights.write_bytes(b"not safetensors")
        return
    if how == "rank":
        content["r"] = 4
    if how == "dora":
        content["use_dora"] = True
    if how == "partner":
        arrays.pop(name)
    if how == "name":
        arrays["something.else"] = arrays[name]
    if how == "nan":
        arrays[name] = arrays[name] * np.nan
    config.write_text(json.dumps(content))
    save_file(arrays, weights)


@pytest.mark.parametrize("how", ["no file", "torn", "rank", "dora", "partner", "name", "nan"])
def test_broken_adapters_are_refused(tmp_path, how):
    folder = save_adapter(tmp_path / "a", state(), SETTINGS, "base")
    _break(folder, how)
    with pytest.raises(InputError) as caught:
        load_adapter(folder)
    assert "\n" not in str(caught.value)


def test_peft_gives_the_same_log_probabilities(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("peft")
    sys.path.insert(0, str(Path(__file__).parent / "engines" / "torch"))
    import batches
    import models
    from test_model import reference

    folder = models.make("llama", tmp_path)
    made = batches.engine(folder)
    rows = [batches.samples([9, 30])]
    adapter = AdapterSettings(rank=4, alpha=8.0)
    target = save_adapter(tmp_path / "adapter", made.state(), adapter, str(folder))
    ours = made.score(batches.batch(rows, 48)).logprob
    np.testing.assert_allclose(ours, reference(folder, rows, target), atol=2e-5)
    base = reference(folder, rows)
    assert np.abs(ours - base).max() > 1e-3
