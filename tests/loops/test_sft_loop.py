"""The SFT loop on the fake engine: learning, resuming, stopping, bad batches."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from instep.batching import fingerprint, make_order
from instep.config import AdapterSettings, OptimizerSettings, RunSettings, SftSettings
from instep.engines.fake import VOCABULARY, FakeEngine
from instep.errors import TrainingError
from instep.loops.listener import StopFlag
from instep.loops.sft import SftLoop
from instep.loops.sft_data import SftData, Split
from instep.records import Sample
from instep.runs.checkpoint import Progress, load_checkpoint
from instep.runs.folder import RunFolder
from instep.runs.metrics import read_metrics
from instep.settings_file import dump_settings
from tests.loops.collector import Collector


def synthetic(count: int, seed: int) -> list[Sample]:
    """Sequences that count upwards, so that the next token can be learned from the last."""
    rng = np.random.default_rng(seed)
    samples = []
    for index in range(count):
        length = int(rng.integers(6, 20))
        tokens = ((rng.integers(VOCABULARY) + np.arange(length)) % VOCABULARY).astype(np.int32)
        weight = (rng.random(length) < 0.5).astype(np.float32)
        weight[0], weight[-1] = 0, 1
        samples.append(Sample(tokens, weight, f"conversation-{index}", (1,)))
    return samples


SETTINGS = SftSettings(
    epochs=4,
    rows_per_step=4,
    rows_per_batch=2,
    adapter=AdapterSettings(rank=8, alpha=16),
    optimizer=OptimizerSettings(learning_rate=0.02),
    run=RunSettings(checkpoint_every_steps=3, evaluate_every_steps=5),
)


def make_data(settings: SftSettings = SETTINGS) -> SftData:
    train, held = synthetic(40, 1), synthetic(8, 2)
    return SftData(
        model_folder=Path(),
        train=Split(train, {}),
        validation=Split(held, {}),
        order=make_order(train, 40, True, settings.rows_per_step, settings.seed),
        validation_order=make_order(held, 40, True, 1, settings.seed),
        row_length=40,
        fingerprint=fingerprint(train),
        choices={},
    )


def make_loop(
    folder: Path, engine: FakeEngine, settings: SftSettings = SETTINGS, listener: Collector | None = None
) -> SftLoop:
    run = RunFolder.create(folder, dump_settings(settings))
    engine.load(settings.model, settings.adapter, settings.optimizer, settings.seed)
    return SftLoop(engine, make_data(settings), settings, run, listener or Collector(), Progress())


def state_of(engine: FakeEngine) -> dict[str, np.ndarray]:
    state = engine.state()
    return {**state.parameters, **{f"m/{k}": v for k, v in state.exp_avg.items()}}


def test_training_lowers_the_held_out_loss_and_keeps_the_best(tmp_path: Path) -> None:
    loop = make_loop(tmp_path / "run", FakeEngine())
    assert loop.train(StopFlag())
    progress = loop.progress
    assert progress.first_validation and progress.last_validation
    assert progress.last_validation["loss"] < 0.7 * progress.first_validation["loss"]
    records = list(read_metrics(loop.run.metrics))
    held = {r["step"]: r["loss"] for r in records if r["kind"] == "validation"}
    assert set(held) == {0, *range(5, progress.step, 5), progress.step}
    assert progress.best_validation_loss == min(loss for step, loss in held.items() if step)
    assert load_checkpoint(loop.run.checkpoint("best"))[1].step == progress.best_step
    assert load_checkpoint(loop.run.checkpoint("last"))[1] == progress
    steps = [r["step"] for r in records if r["kind"] == "train"]
    assert steps == list(range(1, progress.step + 1))


@pytest.mark.parametrize("stop_after", [1, 3, 5, 7])
def test_resumed_equals_uninterrupted_bit_for_bit(tmp_path: Path, stop_after: int) -> None:
    whole = FakeEngine()
    assert make_loop(tmp_path / "whole", whole).train(StopFlag())

    stop = StopFlag()
    first = make_loop(tmp_path / "parts", FakeEngine(), listener=Collector(stop, stop_after))
    assert not first.train(stop)
    first.run.close()
    assert first.progress.step == stop_after

    second = FakeEngine()
    second.load(SETTINGS.model, SETTINGS.adapter, SETTINGS.optimizer, SETTINGS.seed)
    run = RunFolder.reopen(tmp_path / "parts")
    state, progress = load_checkpoint(run.checkpoint("last"))
    second.load_state(state)
    assert SftLoop(second, make_data(), SETTINGS, run, Collector(), progress).train(StopFlag())
    expected = state_of(whole)
    for name, value in state_of(second).items():
        assert np.array_equal(value, expected[name]), name

    def curve(name: str) -> list[tuple[int, float]]:
        records = read_metrics(tmp_path / name / "metrics.jsonl")
        return [(r["step"], r["loss"]) for r in records if r["kind"] == "train"]

    assert curve("parts") == curve("whole")


def test_the_step_does_not_depend_on_micro_batches_or_packing(tmp_path: Path) -> None:
    curves = []
    for name, rows_per_batch in (("one", 1), ("four", 4)):
        settings = SETTINGS.model_copy(update={"rows_per_batch": rows_per_batch, "max_steps": 6})
        loop = make_loop(tmp_path / name, FakeEngine(), settings)
        loop.train(StopFlag())
        curves.append([r["loss"] for r in read_metrics(loop.run.metrics) if r["kind"] == "train"])
    np.testing.assert_allclose(curves[0], curves[1], rtol=1e-10)


class Poisoned(FakeEngine):
    """Gives a non-finite loss on the steps named."""

    def __init__(self, bad_steps: set[int]) -> None:
        self.calls, self.bad_steps = 0, bad_steps

    def forward_backward(self, batch: Any, objective: Any) -> dict[str, float]:
        sums = super().forward_backward(batch, objective)
        step = self.calls // 2
        self.calls += 1
        return {**sums, "loss": math.nan} if step in self.bad_steps else sums


def test_a_bad_batch_is_skipped_counted_and_named(tmp_path: Path) -> None:
    listener = Collector()
    loop = make_loop(
        tmp_path / "run", Poisoned({1, 2}), SETTINGS.model_copy(update={"max_steps": 6}), listener
    )
    assert loop.train(StopFlag())
    assert loop.progress.skipped_steps == 2
    assert sum("conversation-" in note for note in listener.notes) == 2
    text = loop.run.metrics.read_text()
    assert "NaN" not in text
    assert [json.loads(line).get("applied") for line in text.splitlines()].count(False) == 2


def test_three_bad_steps_in_a_row_stop_the_run_with_a_good_checkpoint(tmp_path: Path) -> None:
    loop = make_loop(tmp_path / "run", Poisoned({2, 3, 4}))
    with pytest.raises(TrainingError, match=r"3 steps in a row.*conversation-"):
        loop.train(StopFlag())
    state, progress = load_checkpoint(loop.run.checkpoint("last"))
    assert progress.step == 5 and state.step == 2
    assert all(np.isfinite(value).all() for value in state.parameters.values())


class Frozen(FakeEngine):
    """Its A matrix never gets a gradient, as when a target name matches nothing that is used."""

    def forward_backward(self, batch: Any, objective: Any) -> dict[str, float]:
        sums = super().forward_backward(batch, objective)
        self.gradient[next(name for name in self.gradient if "lora_A" in name)][:] = 0
        return sums


def test_an_adapter_matrix_without_gradient_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="lora_A"):
        make_loop(tmp_path / "run", Frozen()).train(StopFlag())


def test_a_time_limit_ends_the_run_and_its_schedule(tmp_path: Path) -> None:
    settings = SETTINGS.model_copy(update={"epochs": 10_000.0, "max_minutes": 0.5 / 60})
    loop = make_loop(tmp_path / "run", FakeEngine(), settings)
    assert loop.train(StopFlag())
    rates = [r["learning_rate"] for r in read_metrics(loop.run.metrics) if r["kind"] == "train"]
    assert 0.5 <= loop.progress.training_seconds < 2
    assert rates[-1] < 0.2 * max(rates)


def test_another_seed_trains_in_another_order() -> None:
    data = make_data()
    other = replace(data.order, seed=1)
    assert data.order.step(0) != other.step(0)
    assert data.order.step(0) == make_data().order.step(0)
    epoch = data.order.steps_per_epoch
    seen = sorted(index for step in range(epoch) for row in data.order.step(step) for index in row)
    assert seen == list(range(40))
