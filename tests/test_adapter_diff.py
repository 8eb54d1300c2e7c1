"""Two adapters compared, against the plain products of their matrices."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from instep.adapter_diff import Adapter, compare_adapters
from instep.adapters import lora_a_name, lora_b_name, save_adapter
from instep.config import AdapterSettings
from instep.engines.base import EngineState

SHAPES = {"model.layers.0.self_attn.q_proj": (24, 16), "model.layers.0.mlp.down_proj": (16, 40)}


def make(seed: int, rank: int = 4, alpha: float = 8.0, names: tuple[str, ...] = tuple(SHAPES)) -> Adapter:
    rng = np.random.default_rng(seed)
    arrays = {}
    for name in names:
        out, width = SHAPES.get(name, (8, 8))
        arrays[lora_a_name(name)] = rng.normal(size=(rank, width)).astype(np.float32)
        arrays[lora_b_name(name)] = rng.normal(size=(out, rank)).astype(np.float32)
    targets = tuple(sorted({name.rpartition(".")[2] for name in names}))
    return arrays, AdapterSettings(rank=rank, alpha=alpha, target_modules=targets)


def product(adapter: Adapter, module: str) -> np.ndarray:
    arrays, settings = adapter
    b, a = arrays[lora_b_name(module)].astype(np.float64), arrays[lora_a_name(module)].astype(np.float64)
    return settings.alpha / settings.rank * b @ a


@pytest.mark.parametrize("second", [make(1), make(1, rank=6, alpha=3.0)], ids=["same rank", "other rank"])
def test_the_figures_are_those_of_the_plain_products(second: Adapter) -> None:
    first = make(0)
    found = compare_adapters(first, second)
    flat = []
    for layer in found.layers:
        one, other = product(first, layer.module), product(second, layer.module)
        flat.append((one.ravel(), other.ravel()))
        assert layer.norms == pytest.approx((np.linalg.norm(one), np.linalg.norm(other)))
        assert layer.difference == pytest.approx(np.linalg.norm(one - other))
        assert layer.cosine == pytest.approx(np.sum(one * other) / np.prod(layer.norms))
        assert (layer.matrices is None) == (second[1].rank != 4)
    one, other = (np.concatenate(parts) for parts in zip(*flat, strict=True))
    biggest = max(np.linalg.norm(one), np.linalg.norm(other))
    assert found.relative == pytest.approx(np.linalg.norm(one - other) / biggest)
    assert found.cosine == pytest.approx(one @ other / np.linalg.norm(one) / np.linalg.norm(other))


def test_small_differences_are_not_lost_in_rounding() -> None:
    first = make(0)
    module = next(iter(SHAPES))
    arrays = {name: value.copy() for name, value in first[0].items()}
    arrays[lora_b_name(module)] *= np.float32(1 + 2**-20)
    found = compare_adapters(first, (arrays, first[1]))
    layer = next(layer for layer in found.layers if layer.module == module)
    assert layer.relative == pytest.approx(2**-20, rel=1e-2) and layer.cosine == pytest.approx(1)
    assert layer.matrices == (0, pytest.approx(2**-20, rel=1e-2))
    same = compare_adapters(first, first)
    assert same.relative < 1e-14 and same.cosine == pytest.approx(1)


def test_other_factors_of_one_product_are_no_difference() -> None:
    """B·A = (B·M⁻¹)·(M·A): the matrices differ, what they do does not."""
    first = make(0)
    turn = np.random.default_rng(9).normal(size=(4, 4))
    arrays = {}
    for module in SHAPES:
        arrays[lora_a_name(module)] = turn @ first[0][lora_a_name(module)].astype(np.float64)
        arrays[lora_b_name(module)] = first[0][lora_b_name(module)].astype(np.float64) @ np.linalg.inv(turn)
    found = compare_adapters(first, (arrays, first[1]))
    assert found.relative < 1e-12
    assert all(layer.matrices and min(layer.matrices) > 0.1 for layer in found.layers)


def test_layers_that_only_one_has_count_as_zero_in_the_other() -> None:
    first, second = make(0), make(0, names=(next(iter(SHAPES)), "model.layers.1.self_attn.k_proj"))
    found = compare_adapters(first, second)
    assert found.only == (["model.layers.0.mlp.down_proj"], ["model.layers.1.self_attn.k_proj"])
    parts = [np.linalg.norm(product(a, m)) for a, (m,) in zip((first, second), found.only, strict=True)]
    assert found.difference == pytest.approx(np.hypot(*parts))


def test_a_fresh_adapter_is_zero() -> None:
    first, second = make(0), make(0)
    for name in second[0]:
        if "lora_B" in name:
            second[0][name][:] = 0  # type: ignore[index]
    found = compare_adapters(first, second)
    assert found.cosine is None and found.relative == pytest.approx(1) and found.norms[1] == 0
    assert compare_adapters(second, second).relative == 0


def save(folder: Path, adapter: Adapter) -> Path:
    arrays, settings = adapter
    zeros = {name: np.zeros_like(value) for name, value in arrays.items()}
    return save_adapter(folder, EngineState(dict(arrays), zeros, zeros, 1), settings, "base")


def test_the_command_compares_runs_and_adapter_folders(tmp_path: Path) -> None:
    one = save(tmp_path / "run" / "adapter", make(0))
    (one.parent / "config.toml").write_text("")
    save(tmp_path / "other", make(1))

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "instep", "adapter", "diff", *arguments]
        return subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False)

    told = command("run", "other", "--json")
    assert told.returncode == 0, told.stderr
    found = json.loads(told.stdout)
    assert len(found["layers"]) == 2 and found["relative_difference"] > 0.5
    assert command("run", "run/adapter", "--tolerance", "1e-6").returncode == 0
    far = command("run", "other", "--tolerance", "1e-6")
    assert far.returncode == 1 and "relative difference" in far.stdout and "q_proj" in far.stdout
    missing = command("run", "nowhere")
    assert missing.returncode == 2 and missing.stderr.startswith("instep: ") and missing.stdout == ""
