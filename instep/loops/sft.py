"""Supervised fine-tuning: the loop. It drives any engine through its verbs and knows no framework."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from instep.batching import Row, collate
from instep.config import SftSettings
from instep.engines.base import Engine, EngineState
from instep.errors import TrainingError
from instep.loops.listener import Listener, StopFlag
from instep.loops.schedule import Schedule
from instep.loops.sft_data import SftData
from instep.objectives import CrossEntropy
from instep.records import Sample
from instep.runs.checkpoint import Progress, save_checkpoint
from instep.runs.folder import CONFIG, RunFolder
from instep.runs.metrics import MetricsLog

BAD_STEPS_IN_A_ROW = 3


class SftLoop:
    """One run's training. `train` returns when the schedule ends or when `stop` asks; `progress` says where."""

    def __init__(
        self,
        engine: Engine,
        data: SftData,
        settings: SftSettings,
        run: RunFolder,
        listener: Listener,
        progress: Progress,
    ) -> None:
        self.engine, self.data, self.settings, self.run, self.listener = engine, data, settings, run, listener
        self.progress = progress
        total = max(1, math.ceil(settings.epochs * data.order.steps_per_epoch))
        minutes = settings.max_minutes
        self.schedule = Schedule(
            settings.optimizer, min(total, settings.max_steps or total), minutes * 60 if minutes else None
        )
        self.log = MetricsLog(run.metrics, through_step=progress.step)
        self._config = (run.path / CONFIG).read_text(encoding="utf-8")
        self._bad = 0
        self._pace: list[float] = []

    def train(self, stop: StopFlag) -> bool:
        """Run to the end of the schedule. Returns False where `stop` was asked for first.

        Raises TrainingError after three bad steps in a row, with the last good state in `checkpoints/last`.
        """
        while True:
            if self._evaluation_due and not self._evaluate_and_keep_best(stop):
                self.checkpoint()
                return False
            step, finished = self.progress.step, self.finished
            if step and (finished or step % self.settings.run.checkpoint_every_steps == 0):
                self.checkpoint()
            if finished:
                return True
            if stop.requested or not self._step(stop):
                self.checkpoint()
                return False

    @property
    def finished(self) -> bool:
        return self.schedule.done(self.progress.step, self.progress.training_seconds)

    @property
    def _evaluation_due(self) -> bool:
        step = self.progress.step
        if not self.data.validation.samples or self.progress.evaluated_step == step:
            return False
        return step == 0 or self.finished or step % self.settings.run.evaluate_every_steps == 0

    def _step(self, stop: StopFlag) -> bool:
        """One optimizer step. Returns False, with nothing changed, where `stop` was asked for inside it."""
        began = time.perf_counter()
        progress, engine = self.progress, self.engine
        rate = self.schedule.learning_rate(progress.step, progress.training_seconds)
        rows = self.data.order.step(progress.step)
        sums: dict[str, float] = {}
        counts = {"real_tokens": 0, "padded_tokens": 0}
        seconds_data = seconds_compute = 0.0
        per_batch = self.settings.rows_per_batch
        for start in range(0, len(rows), per_batch):
            if stop.requested:
                engine.zero_gradient()
                return False
            tick = time.perf_counter()
            batch = collate(self._samples(rows[start : start + per_batch]), engine.shape_rules(), per_batch)
            seconds_data += time.perf_counter() - tick
            tick = time.perf_counter()
            for name, value in engine.forward_backward(batch, CrossEntropy()).items():
                sums[name] = sums.get(name, 0.0) + value
            seconds_compute += time.perf_counter() - tick
            counts["real_tokens"] += batch.real_tokens
            counts["padded_tokens"] += batch.padded_tokens
        tick = time.perf_counter()
        if math.isfinite(sums["loss"]):
            report = engine.optim_step(rate, sums["weight"])
            applied, norm = report.applied, report.gradient_norm
        else:
            engine.zero_gradient()
            applied, norm = False, math.nan
        done = time.perf_counter()
        taken = done - began
        self.progress = replace(
            progress,
            step=progress.step + 1,
            training_seconds=progress.training_seconds + taken,
            supervised_tokens=progress.supervised_tokens + int(sums["sites"]),
            skipped_steps=progress.skipped_steps + (not applied),
        )
        record = {
            "kind": "train",
            "step": self.progress.step,
            "loss": sums["loss"] / sums["weight"],
            "token_accuracy": sums["correct"] / sums["sites"],
            "learning_rate": rate,
            "gradient_norm": norm,
            "applied": applied,
            "supervised_tokens": int(sums["sites"]),
            "supervised_tokens_per_second": sums["sites"] / taken,
            "real_tokens_per_second": counts["real_tokens"] / taken,
            "padded_tokens_per_second": counts["padded_tokens"] / taken,
            "padding_share": 1 - counts["real_tokens"] / counts["padded_tokens"],
            "seconds": taken,
            "seconds_data": seconds_data,
            "seconds_forward_backward": seconds_compute,
            "seconds_optimizer": done - tick,
            **self._memory(),
        }
        self._tell(record, taken)
        self._check(applied, rows)
        return True

    def _samples(self, rows: Sequence[Row]) -> list[list[Sample]]:
        return [[self.data.train.samples[index] for index in row] for row in rows]

    def _tell(self, record: dict[str, Any], taken: float) -> None:
        self._pace = [*self._pace[-19:], taken]
        self.log.write(record)
        left = self.schedule.remaining_seconds(
            self.progress.step, self.progress.training_seconds, statistics.median(self._pace)
        )
        self.listener.metrics(record, left)

    def _memory(self) -> dict[str, int | None]:
        memory = self.engine.memory()
        return {
            "memory_live_bytes": memory.live_bytes,
            "memory_peak_bytes": memory.peak_bytes,
            "memory_driver_bytes": memory.driver_bytes,
            "memory_resident_bytes": memory.resident_bytes,
        }

    def _check(self, applied: bool, rows: Sequence[Row]) -> None:
        if applied:
            self._bad = 0
            if self.progress.step - self.progress.skipped_steps == 2:
                check_every_adapter_moved(self.engine.state(), self.settings.adapter.kind)
            return
        self._bad += 1
        names = sorted({s.conversation for row in self._samples(rows) for s in row})
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        where = f"step {self.progress.step} (conversations {shown})"
        self.listener.note(f"skipped {where}: loss or gradient was not finite")
        if self._bad >= BAD_STEPS_IN_A_ROW:
            self.checkpoint()
            raise TrainingError(
                f"{self._bad} steps in a row gave a loss or gradient that was not finite, the last one {where}: "
                "lower optimizer.learning_rate, or set model.precision to float32"
            )

    def evaluate(self, stop: StopFlag) -> dict[str, float] | None:
        """Held-out loss (token mean) and accuracy, over at most `evaluation_rows` rows spread over the split.

        None where `stop` was asked for before the end.
        """
        order, samples = self.data.validation_order, self.data.validation.samples
        count = min(len(order.rows), self.settings.run.evaluation_rows)
        chosen = np.unique(np.linspace(0, len(order.rows) - 1, count).round().astype(int))
        loss = weight = correct = sites = 0.0
        began = time.perf_counter()
        for done, index in enumerate(chosen):
            if stop.requested:
                return None
            self.listener.phase("evaluating", done, len(chosen))
            batch = collate([[samples[i] for i in order.rows[index]]], self.engine.shape_rules())
            scores = self.engine.score(batch)
            real = batch.weight > 0
            loss -= float(np.dot(batch.weight[real].astype(np.float64), scores.logprob[real]))
            weight += batch.weight_sum
            correct += float(scores.correct[real].sum())
            sites += float(real.sum())
        self.listener.phase("evaluating", len(chosen), len(chosen))
        if not math.isfinite(loss):
            raise TrainingError("the held-out loss is not finite: set model.precision to float32")
        result = {"loss": loss / weight, "token_accuracy": correct / sites}
        record = {
            "kind": "validation",
            "step": self.progress.step,
            **result,
            "supervised_tokens": int(sites),
            "rows": len(chosen),
            "seconds": time.perf_counter() - began,
        }
        self.log.write(record)
        self.listener.metrics(record, None)
        return result

    def _evaluate_and_keep_best(self, stop: StopFlag) -> bool:
        result = self.evaluate(stop)
        if result is None:
            return False
        progress = self.progress
        self.progress = progress = replace(
            progress,
            evaluated_step=progress.step,
            last_validation=result,
            first_validation=progress.first_validation or result,
        )
        if progress.step and (
            progress.best_validation_loss is None or result["loss"] < progress.best_validation_loss
        ):
            self.progress = replace(progress, best_step=progress.step, best_validation_loss=result["loss"])
            self._save("best", self.engine.state())
        return True

    def checkpoint(self) -> None:
        """Write `checkpoints/last`."""
        self._save("last", self.engine.state())

    def _save(self, name: str, state: EngineState) -> None:
        save_checkpoint(self.run.checkpoint(name), state, self.progress, self._config)


def check_every_adapter_moved(state: EngineState, kind: str) -> None:
    """After two steps every adapter matrix has had a gradient (B from the first, A from the second).

    Raises TrainingError that names the ones without: such a run would train nothing there, silently.
    """
    if kind != "lora":
        return
    still = [name for name, moment in state.exp_avg.items() if not moment.any()]
    if still:
        raise TrainingError(f"{len(still)} adapter matrices got no gradient in two steps, first {still[0]}")
