"""The memory plan: exact where shapes decide, monotonic everywhere, and of the right order beside what was measured."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from instep import plan
from instep.config import GrpoSettings, ModelSettings, SftSettings
from instep.errors import InputError
from instep.fitting import budget_of, options, recommend
from instep.plan import (
    COSTS,
    LENGTH_STEP,
    LONGEST_BY_CHOICE,
    Setup,
    choose_row_length,
    grpo_needs,
    loaded,
    longest_row,
    read_architecture,
    refuse_experts,
    sampling_needs,
    setup_of,
    trained_parameters,
    training_needs,
    weight_bytes,
)

SMOL = {
    "model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "intermediate_size": 1536,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}  # fmt: skip
QWEN = {
    "model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24, "intermediate_size": 4864,
    "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
}  # fmt: skip
GEMMA = {
    "model_type": "gemma3_text", "hidden_size": 640, "num_hidden_layers": 18, "intermediate_size": 2048,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144,
    "max_position_embeddings": 32768,
}  # fmt: skip
GB = 10**9


@pytest.mark.parametrize(
    ("config", "count"),
    [(SMOL, 134_515_008), (QWEN, 494_032_768), (GEMMA, 268_098_176)],
    ids=["Smol", "Qwen", "Gemma"],
)
def test_parameters_are_counted_exactly(config: dict[str, Any], count: int) -> None:
    shape = read_architecture(config)
    assert shape.parameters == count
    assert weight_bytes(shape, Setup()) == 2 * count
    assert weight_bytes(shape, Setup(value_bytes=4)) == 4 * count
    small = weight_bytes(shape, Setup(engine="mlx", four_bit=True))
    assert 4.5 / 8 * count <= small < 0.57 * count


def test_they_are_those_of_a_models_files(tiny_model: Path) -> None:
    shape = read_architecture(json.loads((tiny_model / "config.json").read_text()))
    with safe_open(tiny_model / "model.safetensors", "np") as file:
        found = sum(file.get_tensor(name).size for name in file.keys())  # noqa: SIM118
    assert shape.parameters == found


def test_the_adapter_is_counted_exactly() -> None:
    shape = read_architecture(SMOL)
    # q and o: 576 + 576; k and v: 576 + 192; the MLP's three: 576 + 1536.
    assert trained_parameters(shape, Setup(rank=16)) == 30 * 16 * (2 * 1152 + 2 * 768 + 3 * 2112)
    assert trained_parameters(shape, Setup(targets=("q_proj",), rank=1)) == 30 * 1152
    needs = loaded(shape, Setup())
    assert needs.optimizer == 2 * needs.gradient == 2 * needs.trained
    full = loaded(shape, replace(Setup(), full=True))
    assert full.trained + full.gradient + full.optimizer == 16 * shape.parameters  # as the torch engine says
    assert loaded(shape, Setup(full=True, value_bytes=4)).trained == 0


@pytest.mark.parametrize("engine", sorted(COSTS))
def test_more_work_needs_more_memory_and_checkpointing_less(engine: str) -> None:
    shape, setup = read_architecture(QWEN), Setup(engine=engine)
    totals = [training_needs(shape, setup, 1, length).total for length in (256, 512, 1024, 2048, 4096)]
    assert totals == sorted(totals) and len(set(totals)) == 5
    assert training_needs(shape, setup, 2, 1024).total > training_needs(shape, setup, 1, 1024).total
    saved = training_needs(shape, replace(setup, checkpointing=True), 1, 4096)
    assert saved.activations < 0.25 * training_needs(shape, setup, 1, 4096).activations
    small = training_needs(shape, replace(setup, four_bit=True), 1, 1024)
    assert small.weights < 0.6 * training_needs(shape, setup, 1, 1024).weights
    assert small.total == sum(asdict(small).values())


def test_keys_and_values_of_prompts_are_held_once() -> None:
    shape = read_architecture(SMOL)
    token = 30 * 2 * 3 * 64 * 2
    needs = sampling_needs(shape, Setup(), prompts=2, group=8, prompt=100, new=64)
    assert needs.kv_cache == token * (2 * 100 + 16 * 64)
    longer = sampling_needs(shape, Setup(), prompts=2, group=8, prompt=200, new=64)
    assert longer.kv_cache - needs.kv_cache == token * 200


@pytest.mark.parametrize("engine", sorted(COSTS))
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_longest_row_is_the_longest_that_fits(engine: str, checkpointing: bool) -> None:
    shape, setup = read_architecture(QWEN), Setup(engine=engine, checkpointing=checkpointing)
    for budget in (3 * GB, 6 * GB):
        length = longest_row(shape, setup, 1, budget)
        assert length % LENGTH_STEP == 0 and length > 0
        assert training_needs(shape, setup, 1, length).total <= budget
        longer = length + LENGTH_STEP
        assert longer > shape.context or training_needs(shape, setup, 1, longer).total > budget
    assert longest_row(shape, setup, 1, GB // 2) == 0
    assert longest_row(shape, setup, 1, 10**15) == shape.context


def test_the_plan_is_of_the_order_of_what_was_measured() -> None:
    """docs/log.md, torch engine, bf16, rows of at most 2,048 tokens: 2.89 GB, with checkpointing 1.86 GB.

    A wide band on purpose: the constants are not calibrated.
    """
    shape = read_architecture(SMOL)
    for checkpointing, measured in ((False, 2.89e9), (True, 1.86e9)):
        needs = training_needs(shape, Setup(checkpointing=checkpointing), 1, 2048)
        assert 0.5 < needs.total / measured < 1.5


def test_the_row_length_is_the_shortest_limit() -> None:
    def choose(longest: int, available: float, context: int = 8192) -> tuple[int, str]:
        return choose_row_length(SMOL, longest, context, int(available * GB), 1, Setup())

    assert choose(1000, 100) == (1024, "1024: the longest conversation")
    assert choose(10**6, 100)[0] == LONGEST_BY_CHOICE
    assert choose(10**6, 100, context=512) == (512, "512: the model's context")
    length, reason = choose(10**6, 3)
    assert "memory" in reason and 256 <= length < LONGEST_BY_CHOICE
    assert choose(10**6, 0.1)[0] == 256


def test_settings_decide_the_setup() -> None:
    settings = SftSettings(
        model=ModelSettings(precision="float32", gradient_checkpointing=True, head_chunk=64)
    )
    setup = setup_of(settings)
    assert (setup.engine, setup.value_bytes, setup.checkpointing, setup.head_chunk) == ("torch", 4, True, 64)
    assert setup_of(GrpoSettings()).value_bytes == 2


def test_the_engine_is_the_one_that_would_be_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> tuple[str, str]:
        raise InputError("no engine is installed")

    monkeypatch.setattr(plan, "choose", lambda name: ("mlx", "default on Apple silicon"))
    assert setup_of(SftSettings()).engine == "mlx"
    monkeypatch.setattr(plan, "choose", nothing)
    assert setup_of(SftSettings()).engine == "torch"


def test_advice_takes_the_fastest_way_that_fits() -> None:
    shape, engines = read_architecture(QWEN), ["torch"]

    def advise(budget: float) -> tuple[str | None, str]:
        found = options(shape, engines, SftSettings(), GrpoSettings(), 2048, 512, int(budget * GB))
        best, why = recommend(found, 2048, int(budget * GB))
        return (None if best is None else best.name), why

    assert advise(100)[0] == "torch, 16-bit weights, without gradient checkpointing"
    assert advise(2.8)[0] == "torch, 16-bit weights, with gradient checkpointing"
    nothing, why = advise(1.85)
    assert nothing is None and "rendering.max_length = " in why
    assert advise(0.3) == (None, "no row fits in 0.3 GB: take a smaller model, or more memory")


def test_an_amount_of_memory_is_read() -> None:
    assert [budget_of(text)[0] for text in ("16GB", "16", "16 gb")] == [int(0.7 * 16 * GB)] * 3
    assert budget_of("8GiB")[0] == int(0.7 * 8 * 2**30)
    for wrong in ("much", "-3GB", "0"):
        with pytest.raises(InputError, match="--memory"):
            budget_of(wrong)


def test_what_is_no_decoder_is_refused() -> None:
    with pytest.raises(InputError, match="num_attention_heads"):
        read_architecture({"model_type": "other", "hidden_size": 8, "num_hidden_layers": 2, "vocab_size": 9})
    with pytest.raises(InputError, match="num_local_experts = 8"):
        refuse_experts({**SMOL, "num_local_experts": 8})


def test_grpo_has_two_phases() -> None:
    sampling, training = grpo_needs(read_architecture(SMOL), Setup(), GrpoSettings(), 300)
    assert sampling.kv_cache > 0 and training.kv_cache == 0 and training.activations > sampling.activations


def test_the_command_needs_a_config_only(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(QWEN))

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "instep", "plan", "--model", "model", *arguments]
        return subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False)

    told = json.loads(command("--memory", "16GB", "--length", "1024", "--json").stdout)
    assert told["parameters"] == 494_032_768 and told["calibrated"] is False
    assert {one["engine"] for one in told["options"]} == set(COSTS) and len(told["options"]) == 12
    for one in told["options"]:
        for phase in ("sft", "grpo_sampling", "grpo_training"):
            parts = dict(one[phase])
            assert parts.pop("total") == sum(parts.values())
        assert one["sft_fits"] == (one["sft"]["total"] <= told["budget_bytes"])
    shown = command("--memory", "16GB", "--engine", "torch")
    assert shown.returncode == 0 and "not calibrated" in shown.stdout and "kv cache" in shown.stdout
    more = json.loads(command("--memory", "16GB", "--set", "rows_per_batch=4", "--json").stdout)
    assert more["options"][0]["sft"]["total"] > told["options"][0]["sft"]["total"]
    for wrong, word in (
        (["--engine", "tpu"], "tpu"),
        (["--set", "colour=red"], "colour"),
        (["--memory", "x"], "x"),
    ):
        refused = command(*wrong)
        assert refused.returncode == 2 and word in refused.stderr and refused.stdout == ""
