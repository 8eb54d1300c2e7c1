"""Supervised fine-tuning: the loop. It drives any engine through its verbs and knows no framework."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from instep.batching import Row, collate
from instep.config import SftSettings
from instep.engines.base import Engine
from instep.errors import TrainingError
from instep.loops.listener import Listener, StopFlag
from instep.loops.loop import Loop
from instep.loops.sft_data import SftData
from instep.objectives import CrossEntropy
from instep.records import Sample
from instep.runs.checkpoint import Progress
from instep.runs.folder import RunFolder


class SftLoop(Loop):
    """Cross-entropy on the supervised tokens of packed rows."""

    def __init__(
        self,
        engine: Engine,
        data: SftData,
        settings: SftSettings,
        run: RunFolder,
        listener: Listener,
        progress: Progress,
    ) -> None:
        total = max(1, math.ceil(settings.epochs * data.order.steps_per_epoch))
        super().__init__(engine, settings, run, listener, progress, min(total, settings.max_steps or total))
        self.data, self.settings = data, settings

    @property
    def has_validation(self) -> bool:
        return bool(self.data.validation.samples)

    def is_better(self, result: dict[str, float]) -> bool:
        best = self.progress.best_validation_loss
        return best is None or result["loss"] < best

    def with_best(self, progress: Progress, result: dict[str, float]) -> Progress:
        return replace(progress, best_validation_loss=result["loss"])

    def step(self, stop: StopFlag) -> bool:
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
        report = self.update(sums, rate, sums["weight"])
        done = time.perf_counter()
        taken = done - began
        self.progress = replace(
            progress,
            step=progress.step + 1,
            updates=progress.updates + report.applied,
            training_seconds=progress.training_seconds + taken,
            supervised_tokens=progress.supervised_tokens + int(sums["sites"]),
            skipped_steps=progress.skipped_steps + (not report.applied),
        )
        record = {
            "kind": "train",
            "step": self.progress.step,
            "loss": sums["loss"] / sums["weight"],
            "token_accuracy": sums["correct"] / sums["sites"],
            "learning_rate": rate,
            "gradient_norm": report.gradient_norm,
            "applied": report.applied,
            "supervised_tokens": int(sums["sites"]),
            "supervised_tokens_per_second": sums["sites"] / taken,
            "real_tokens_per_second": counts["real_tokens"] / taken,
            "padded_tokens_per_second": counts["padded_tokens"] / taken,
            "padding_share": 1 - counts["real_tokens"] / counts["padded_tokens"],
            "seconds": taken,
            "seconds_data": seconds_data,
            "seconds_forward_backward": seconds_compute,
            "seconds_optimizer": done - tick,
        }
        self.tell(record, taken)
        names = {f"conversation {s.conversation}" for row in self._samples(rows) for s in row}
        self.check_applied(report.applied, sorted(names))
        return True

    def _samples(self, rows: Sequence[Row]) -> list[list[Sample]]:
        return [[self.data.train.samples[index] for index in row] for row in rows]

    def evaluate(self, stop: StopFlag) -> dict[str, float] | None:
        """Held-out loss (token mean) and accuracy, over at most `evaluation_rows` rows spread over the split.

        None where `stop` was asked for before the end.
        """
        order, samples = self.data.validation_order, self.data.validation.samples
        count = min(len(order.rows), self.settings.evaluation_rows)
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
        self.tell_validation(
            {
                **result,
                "supervised_tokens": int(sites),
                "rows": len(chosen),
                "seconds": time.perf_counter() - began,
            }
        )
        return result
