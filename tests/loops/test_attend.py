"""What keeps a run company: swap that grows, memory that runs out, the last sign of life, the words of the log."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from instep import engines
from instep.config import GrpoSettings, ModelSettings, RunSettings, TrackingSettings
from instep.engines.fake import FakeEngine
from instep.errors import InputError, TrainingError
from instep.loops import attend
from instep.loops.attend import Attendance, is_out_of_memory, memory_advice
from instep.loops.listener import StopFlag
from instep.loops.run import load_engine, load_trained
from instep.loops.sft import SftLoop
from instep.runs.checkpoint import load_checkpoint
from instep.runs.heartbeat import read_heartbeat
from instep.runs.machine import Reading
from instep.runs.metrics import read_metrics
from instep.runs.mirror import Mirror
from instep.runs.vocabulary import NOT_FIGURES, known
from tests.loops import test_grpo_loop, test_sft_loop
from tests.loops.collector import Collector

GB = 10**9
CALM = Reading(16 * GB, 8 * GB, 0, 0, "normal", 2 * GB)


class Machine:
    """A simulated reading: the swap in use rises when the run reaches a step, and falls when the test says so."""

    def __init__(self) -> None:
        self.loop: SftLoop | None = None
        self.at, self.freed = 3, False

    def __call__(self) -> Reading:
        grown = self.loop is not None and self.loop.progress.step >= self.at and not self.freed
        return replace(CALM, swap_used_bytes=2 * GB if grown else 0)


def settings_for(on_swap: str) -> Any:
    run = RunSettings(
        on_swap=on_swap, watch_seconds=0.005, checkpoint_every_steps=1000, evaluate_every_steps=1000
    )  # type: ignore[arg-type]
    return test_sft_loop.SETTINGS.model_copy(update={"run": run, "epochs": 40.0, "max_steps": 40})


class Slow(FakeEngine):
    """Leaves the watch time to look."""

    def optim_step(self, *arguments: Any) -> Any:
        time.sleep(0.02)
        return super().optim_step(*arguments)


def attended(folder: Path, engine: FakeEngine, settings: Any, machine: Machine, stop: StopFlag) -> Collector:
    listener = Collector()
    loop = test_sft_loop.make_loop(folder, engine, settings, listener)
    mirror = Mirror(TrackingSettings(tracker="none"), folder, listener.note)
    try:
        with Attendance(settings, loop.run, mirror, listener, 0, machine) as attendance:
            machine.loop = loop
            loop.attended_by(attendance).train(stop)
    finally:
        loop.close()
        loop.run.close()
    return listener


def test_growing_swap_is_told_with_the_setting_to_lower(tmp_path: Path) -> None:
    listener = attended(tmp_path / "run", Slow(), settings_for("warn"), Machine(), StopFlag())
    (note,) = [note for note in listener.notes if "swap has grown" in note]
    assert "2.0 GB" in note and "rows_per_batch" in note
    beat = read_heartbeat(tmp_path / "run")
    assert beat and beat.ended == "finished" and beat.step == 40
    record = [r for r in listener.records if r["kind"] == "train"][-1]
    assert record["memory_swap_used_bytes"] == 2 * GB and record["memory_available_bytes"] == 8 * GB


def test_growing_swap_can_end_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"stopped after step \d+.*rows_per_batch.*--resume"):
        attended(tmp_path / "run", Slow(), settings_for("stop"), Machine(), StopFlag())
    step = load_checkpoint(tmp_path / "run" / "checkpoints" / "last")[1].step
    assert 3 <= step < 40
    beat = read_heartbeat(tmp_path / "run")
    assert beat and beat.step == step and str(beat.ended).startswith("error: TrainingError")


def test_growing_swap_can_pause_the_run_until_memory_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attend, "PAUSE_SECONDS", 0.01)
    machine = Machine()
    paused_at: list[int] = []

    def close_the_browser() -> None:
        for _ in range(3000):
            beat = read_heartbeat(tmp_path / "run")
            if beat and beat.doing == "paused":
                paused_at.append(load_checkpoint(tmp_path / "run" / "checkpoints" / "last")[1].step)
                break
            time.sleep(0.01)
        machine.freed = True

    helper = threading.Thread(target=close_the_browser)
    helper.start()
    listener = attended(tmp_path / "run", Slow(), settings_for("pause"), machine, StopFlag())
    helper.join()
    assert paused_at and 3 <= paused_at[0] < 40
    assert [note for note in listener.notes if note.startswith(f"paused after step {paused_at[0]}")]
    assert any(note.startswith("going on after a pause") for note in listener.notes)
    assert max(record["step"] for record in listener.records) == 40


def test_a_pause_can_be_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend, "PAUSE_SECONDS", 0.01)
    stop = StopFlag()

    def ask() -> None:
        for _ in range(3000):
            beat = read_heartbeat(tmp_path / "run")
            if beat and beat.doing == "paused":
                break
            time.sleep(0.01)
        stop.requested = True

    helper = threading.Thread(target=ask)
    helper.start()
    attended(tmp_path / "run", Slow(), settings_for("pause"), Machine(), stop)
    helper.join()
    beat = read_heartbeat(tmp_path / "run")
    assert beat and beat.ended == "stopped" and beat.step < 40


class Full(FakeEngine):
    """Runs out of memory in its 21st pass, as PyTorch does on a CPU."""

    calls = 0

    def forward_backward(self, batch: Any, objective: Any) -> dict[str, float]:
        self.calls += 1
        if self.calls > 20:
            raise RuntimeError(
                "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried "
                "to allocate 34359738368 bytes. Error code 12 (Cannot allocate memory)"
            )
        return super().forward_backward(batch, objective)


def test_memory_that_runs_out_keeps_the_checkpoint_and_gives_advice(tmp_path: Path) -> None:
    settings = settings_for("warn")
    settings = settings.model_copy(
        update={"run": settings.run.model_copy(update={"checkpoint_every_steps": 4})}
    )
    machine = Machine()
    machine.at = 1000
    with pytest.raises(TrainingError, match=r"memory ran out after step 11.*rows_per_batch=1.*--resume"):
        attended(tmp_path / "run", Full(), settings, machine, StopFlag())
    assert load_checkpoint(tmp_path / "run" / "checkpoints" / "last")[1].step == 8


def test_what_frameworks_say_when_memory_is_out() -> None:
    said = [
        MemoryError(),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("MPS backend out of memory (MPS allocated: 17.05 GB)"),
        RuntimeError("[metal::malloc] Attempting to allocate 9999999999 bytes which is greater than"),
        ValueError("RESOURCE_EXHAUSTED: Out of memory allocating 68719476736 bytes."),
        OSError(12, "Cannot allocate memory"),
    ]
    assert all(is_out_of_memory(error) for error in said)
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(TrainingError("memory ran out"))


class TooLarge(FakeEngine):
    def load(self, *arguments: Any) -> Any:
        raise RuntimeError("MPS backend out of memory (MPS allocated: 17.05 GB)\nmore")


def test_a_model_that_does_not_fit_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "create", lambda name: TooLarge())
    words = r"does not fit in memory \(MPS backend out of memory.*GB\)\): .*instep plan"
    with pytest.raises(InputError, match=words):
        load_engine("torch", test_sft_loop.SETTINGS, Path("model"), Collector())
    with pytest.raises(InputError, match=words):
        load_trained("torch", ModelSettings(), Path("model"))


def test_advice_goes_from_the_cheapest_to_the_last() -> None:
    given = []
    settings: Any = test_sft_loop.SETTINGS
    steps = [
        {},
        {"rows_per_batch": 1},
        {"model": ModelSettings(gradient_checkpointing=True)},
        {"model": ModelSettings(gradient_checkpointing=True, head_chunk=64)},
    ]
    for step in steps:
        settings = settings.model_copy(update=step)
        given.append(memory_advice(settings))
    for words, advice in zip(
        ("rows_per_batch", "gradient_checkpointing", "head_chunk", "new run"), given, strict=True
    ):
        assert words in advice
    grpo = GrpoSettings(model=ModelSettings(gradient_checkpointing=True))
    assert "tokens_per_batch=2048" in memory_advice(grpo)


def test_every_figure_of_a_record_is_in_the_vocabulary(tmp_path: Path) -> None:
    machine = Machine()
    attended(tmp_path / "sft", FakeEngine(), settings_for("warn"), machine, StopFlag())
    loop = test_grpo_loop.make_loop(tmp_path / "grpo", FakeEngine(), {"max_steps": 2})
    loop.train(StopFlag())
    loop.close()
    kinds = set()
    for run in ("sft", "grpo"):
        for record in read_metrics(tmp_path / run / "metrics.jsonl"):
            kinds.add((run, record["kind"]))
            unknown = [name for name in record if name not in NOT_FIGURES and not known(name)]
            assert not unknown, f"{run} {record['kind']}: add {unknown} to instep/runs/vocabulary.py"
    assert len(kinds) == 4
