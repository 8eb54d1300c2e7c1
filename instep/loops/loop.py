"""What every training loop shares: when to evaluate, checkpoint, stop and give up."""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any, Self

from instep.config import GrpoSettings, SftSettings
from instep.engines.base import Engine, EngineState, StepReport
from instep.errors import TrainingError
from instep.loops.attend import Attendance, Unattended
from instep.loops.listener import Listener, StopFlag
from instep.loops.schedule import Schedule
from instep.runs.checkpoint import Progress, save_checkpoint
from instep.runs.folder import CONFIG, RunFolder
from instep.runs.metrics import MetricsLog

BAD_STEPS_IN_A_ROW = 3
PACE_STEPS = 20
"""The time that is left is estimated from the median of so many last steps."""


class Loop(ABC):
    """One run's training. `train` returns when the schedule ends or when a stop is asked; `progress` says where."""

    def __init__(
        self,
        engine: Engine,
        settings: SftSettings | GrpoSettings,
        run: RunFolder,
        listener: Listener,
        progress: Progress,
        total_steps: int,
    ) -> None:
        self.engine, self.run, self.listener, self.progress = engine, run, listener, progress
        self._run_settings = settings.run
        self._moved = settings.adapter.kind != "lora"
        minutes = settings.max_minutes
        self.schedule = Schedule(settings.optimizer, total_steps, minutes * 60 if minutes else None)
        self.log = MetricsLog(run.metrics, through_step=progress.step)
        self._attendance = Unattended()
        self._config = (run.path / CONFIG).read_text(encoding="utf-8")
        self._bad = 0
        self._pace: list[float] = []
        self._compiled = self._compile_seconds()

    def _compile_seconds(self) -> float | None:
        """What the engine has spent on compiling so far; None where it compiles nothing."""
        return getattr(self.engine, "compile_seconds", None)

    @abstractmethod
    def step(self, stop: StopFlag) -> bool:
        """One step; advances `progress`. Returns False, with nothing changed, where `stop` was asked for inside."""

    @abstractmethod
    def evaluate(self, stop: StopFlag) -> dict[str, float] | None:
        """Held-out figures as they go to the log; None where `stop` was asked for before the end."""

    @property
    @abstractmethod
    def has_validation(self) -> bool: ...

    @abstractmethod
    def is_better(self, result: dict[str, float]) -> bool:
        """Whether held-out figures are better than those of `checkpoints/best`."""

    @abstractmethod
    def with_best(self, progress: Progress, result: dict[str, float]) -> Progress: ...

    def train(self, stop: StopFlag) -> bool:
        """Run to the end of the schedule. Returns False where `stop` was asked for first.

        Raises TrainingError after three bad steps in a row, with the last good state in `checkpoints/last`.
        """
        finished = self._train(stop)
        self._attendance.outcome = "finished" if finished else "stopped"
        return finished

    def _train(self, stop: StopFlag) -> bool:
        while True:
            if self._evaluation_due and not self._evaluate_and_keep_best(stop):
                self.checkpoint()
                return False
            step, finished = self.progress.step, self.finished
            if step and (finished or step % self._run_settings.checkpoint_every_steps == 0):
                self.checkpoint()
            if finished:
                return True
            if stop.requested or not self.step(stop):
                self.checkpoint()
                return False
            self._attendance.after_step(self.progress.step, self.checkpoint, stop)

    def attended_by(self, attendance: Attendance) -> Self:
        """With a tracker, the watch over memory and the heartbeat; without, as in tests, it trains alone."""
        self._attendance = attendance
        return self

    @property
    def finished(self) -> bool:
        return self.schedule.done(self.progress.step, self.progress.training_seconds)

    @property
    def _evaluation_due(self) -> bool:
        step = self.progress.step
        if not self.has_validation or self.progress.evaluated_step == step:
            return False
        return step == 0 or self.finished or step % self._run_settings.evaluate_every_steps == 0

    def _evaluate_and_keep_best(self, stop: StopFlag) -> bool:
        self._attendance.doing = "evaluating"
        result = self.evaluate(stop)
        self._attendance.doing = "training"
        if result is None:
            return False
        self.progress = progress = replace(
            self.progress,
            evaluated_step=self.progress.step,
            last_validation=result,
            first_validation=self.progress.first_validation or result,
        )
        if progress.step and self.is_better(result):
            self.progress = replace(self.with_best(progress, result), best_step=progress.step)
            self._save("best", self.engine.state())
        return True

    def checkpoint(self) -> None:
        """Write `checkpoints/last`."""
        self._save("last", self.engine.state())

    def _save(self, name: str, state: EngineState) -> None:
        save_checkpoint(self.run.checkpoint(name), state, self.progress, self._config)

    def close(self) -> None:
        self.log.close()

    def update(self, sums: dict[str, float], rate: float, denominator: float) -> StepReport:
        """The optimizer step, unless the loss is not finite: then the gradient is forgotten."""
        if math.isfinite(sums["loss"]):
            return self.engine.optim_step(rate, denominator)
        self.engine.zero_gradient()
        return StepReport(math.nan, False)

    def tell(self, record: dict[str, Any], seconds: float) -> None:
        """Log one step's record, with the engine's memory, and show it with the time that is left."""
        memory = self.engine.memory()
        record |= {
            "memory_live_bytes": memory.live_bytes,
            "memory_peak_bytes": memory.peak_bytes,
            "memory_driver_bytes": memory.driver_bytes,
            "memory_resident_bytes": memory.resident_bytes,
        }
        compiled = self._compile_seconds()
        if compiled is not None and self._compiled is not None:
            record["seconds_compile"] = compiled - self._compiled
            self._compiled = compiled
        record |= self._attendance.figures()
        self._pace = [*self._pace[1 - PACE_STEPS :], seconds]
        self.log.write(record)
        progress = self.progress
        left = self.schedule.remaining_seconds(
            progress.step, progress.training_seconds, statistics.median(self._pace)
        )
        self.listener.metrics(record, left)

    def tell_validation(self, record: dict[str, Any]) -> None:
        record = {"kind": "validation", "step": self.progress.step, **record}
        self.log.write(record)
        self.listener.metrics(record, None)

    def check_applied(self, applied: bool, names: list[str]) -> None:
        """Count bad steps, name what they were made from, and give up after three in a row."""
        if applied:
            self._bad = 0
            if not self._moved and self.progress.updates >= 2:
                check_every_adapter_moved(self.engine.state())
                self._moved = True
            return
        self._bad += 1
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        where = f"step {self.progress.step} ({shown})"
        self.listener.note(f"skipped {where}: loss or gradient was not finite")
        if self._bad >= BAD_STEPS_IN_A_ROW:
            self.checkpoint()
            raise TrainingError(
                f"{self._bad} steps in a row gave a loss or gradient that was not finite, the last one {where}: "
                "lower optimizer.learning_rate, or set model.precision to float32"
            )


def check_every_adapter_moved(state: EngineState) -> None:
    """After two updates every adapter matrix has had a gradient (B from the first, A from the second).

    Raises TrainingError that names the ones without: such a run would train nothing there, silently.
    """
    still = [name for name, moment in state.exp_avg.items() if not moment.any()]
    if still:
        raise TrainingError(f"{len(still)} adapter matrices got no gradient in two steps, first {still[0]}")
