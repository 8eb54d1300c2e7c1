"""GRPO (arXiv 2402.03300): sample → score → credit → step, on any engine."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from instep.config import GrpoSettings
from instep.engines.base import Engine
from instep.errors import TrainingError
from instep.loops.listener import Listener, StopFlag, Stopped
from instep.loops.loop import Loop
from instep.objectives import Grpo, add_metrics
from instep.records import Group
from instep.rendering.template import Renderer
from instep.rewards import Rewards
from instep.rollouts import (
    RolloutBatch,
    has_signal,
    make_batches,
    reward_metrics,
    rollout_records,
    sample_rollouts,
    sampling_of,
    score_groups,
    with_reference,
)
from instep.runs.checkpoint import Progress
from instep.runs.folder import RunFolder
from instep.runs.metrics import MetricsLog
from instep.tasks import Task, Tasks, TaskStream

RATIO_TOLERANCE = {"float32": 1e-3}
"""Largest |log r| before the first update of a step; 16-bit kernels differ more, which is logged, not refused."""
HELD_OUT_KEY = 1 << 40
"""Keys of held-out prompts, apart from those that are trained on."""
SHOWN_HELD_OUT, SHOWN_PROMPT, SHOWN_COMPLETION = 1, 80, 160
"""On the console at each evaluation: held-out rollouts, characters of the question's end and of the completion."""


@dataclass(frozen=True)
class GrpoData:
    tasks: Tasks
    renderer: Renderer
    rewards: Rewards


class GrpoLoop(Loop):
    """One step is one set of rollouts and `objective.iterations` updates on it."""

    def __init__(
        self,
        engine: Engine,
        precision: str,
        data: GrpoData,
        settings: GrpoSettings,
        run: RunFolder,
        listener: Listener,
        progress: Progress,
    ) -> None:
        super().__init__(engine, settings, run, listener, progress, settings.max_steps or 1_000_000)
        self.settings, self.data = settings, data
        self._tolerance = RATIO_TOLERANCE.get(precision, math.inf)
        self._without_signal = self._all_cut = 0
        self._latest: list[dict[str, Any]] = []
        self._table = MetricsLog(run.path / "rollouts.jsonl", through_step=progress.step)
        self._held_out = data.tasks.test.take(settings.evaluation_tasks)
        low, high = settings.objective.epsilons
        self.objective = Grpo(
            settings.objective.variant, low, high, settings.objective.beta, settings.rollouts.temperature,
            settings.rollouts.group_size if settings.objective.variant == "gspo" else 0,
        )  # fmt: skip

    @property
    def has_validation(self) -> bool:
        return bool(self._held_out)

    def is_better(self, result: dict[str, float]) -> bool:
        best = self.progress.best_reward
        return best is None or result["reward"] > best

    def with_best(self, progress: Progress, result: dict[str, float]) -> Progress:
        return replace(progress, best_reward=result["reward"])

    def step(self, stop: StopFlag) -> bool:
        """Sample, score, credit, and update. Returns False, with nothing changed, where `stop` was asked for."""
        began = time.perf_counter()
        progress, settings = self.progress, self.settings
        rate = self.schedule.learning_rate(progress.step, progress.training_seconds)
        stream = TaskStream(self.data.tasks.train, settings.seed, progress.task_cursor)
        timeouts = self.data.rewards.judge.timeouts
        try:
            groups, tasks, sampled = self._rollouts(stream, stop)
        except Stopped:
            return False
        sampled_at = time.perf_counter()
        batches, denominator = make_batches(
            groups, settings.objective, settings.rewards, settings.rollouts.max_new_tokens,
            settings.tokens_per_batch, self.engine.shape_rules(),
        )  # fmt: skip
        if self.objective.beta > 0:
            batches = [with_reference(batch, self.engine, self.objective.temperature) for batch in batches]
        sums, applied, norm = self._updates(batches, denominator, rate)
        done = time.perf_counter()
        self.progress = replace(
            progress,
            step=progress.step + 1,
            updates=progress.updates + (settings.objective.iterations if batches and applied else 0),
            training_seconds=progress.training_seconds + done - began,
            supervised_tokens=progress.supervised_tokens + int(sums.get("sites", 0)),
            skipped_steps=progress.skipped_steps + (not applied),
            task_cursor=stream.cursor,
            rollouts=progress.rollouts + sampled,
        )
        records = rollout_records(groups, tasks, self.progress.step, settings.rewards)
        for one in records:
            self._table.write(one)
        self._latest = records
        record = {
            "kind": "train",
            "step": self.progress.step,
            **reward_metrics(groups, settings.rewards),
            **_objective_metrics(sums),
            "learning_rate": rate,
            "gradient_norm": norm,
            "applied": applied,
            "rollouts": sampled,
            "comparison_timeouts": self.data.rewards.judge.timeouts - timeouts,
            "sampled_tokens": sum(len(r.tokens) for g in groups for r in g.rollouts),
            "seconds": done - began,
            "seconds_rollouts": sampled_at - began,
            "seconds_forward_backward": done - sampled_at,
        }
        self.tell(record, done - began)
        self.check_applied(applied, [f"task {group.task}" for group in groups])
        self._watch(record)
        return True

    def _rollouts(self, stream: TaskStream, stop: StopFlag) -> tuple[list[Group], dict[str, Task], int]:
        """(groups, their tasks by id, completions sampled); groups without spread are replaced where asked.

        Raises Stopped where a stop was asked for meanwhile.
        """
        settings = self.settings
        sampling = sampling_of(settings.rollouts, self.data.renderer.stop_tokens, settings.seed)
        kept: list[Group] = []
        by_id: dict[str, Task] = {}
        count = 0
        attempts = 1 + (settings.max_resamples if settings.no_spread == "resample" else 0)
        for attempt in range(attempts):
            key = stream.cursor
            tasks = stream.take(settings.tasks_per_step - len(kept))
            keys = [key + index for index in range(len(tasks))]
            size = settings.rollouts.group_size
            sampled = sample_rollouts(
                self.engine, self.data.renderer, tasks, size, sampling, keys, settings.rollouts.stop_strings,
                on_token=stop.check,
            )  # fmt: skip
            stop.check()
            count += size * len(tasks)
            by_id |= {task.id: task for task in tasks}
            groups = score_groups(
                self.data.rewards, tasks, sampled, settings.rewards, settings.objective.scales_by_std
            )
            if attempt == attempts - 1:
                return kept + groups, by_id, count
            kept += [group for group in groups if has_signal(group, settings.rewards)]
            if len(kept) == settings.tasks_per_step:
                break
        return kept, by_id, count

    def _updates(
        self, batches: Sequence[RolloutBatch], denominator: float, rate: float
    ) -> tuple[dict[str, float], bool, float]:
        """(sums of the first pass, applied, gradient norm of the last update)."""
        first: dict[str, float] = {}
        applied, norm = True, 0.0
        if not batches:
            return first, applied, norm
        for iteration in range(self.settings.objective.iterations):
            sums: dict[str, float] = {}
            for one in batches:
                sums = add_metrics(sums, self.engine.forward_backward(one.batch, self.objective))
            if iteration == 0:
                first = sums | {"loss_mean": sums["loss"] / denominator}
                if sums["max_log_ratio"] > self._tolerance:
                    self.engine.zero_gradient()
                    raise TrainingError(
                        f"before the first update of step {self.progress.step + 1} sampler and trainer disagree by "
                        f"{sums['max_log_ratio']:.2e} in a token's log-probability (at most {self._tolerance:.0e}): "
                        "the step would not be on-policy"
                    )
            report = self.update(sums, rate, denominator)
            applied, norm = applied and report.applied, report.gradient_norm
        return first, applied, norm

    def _watch(self, record: dict[str, object]) -> None:
        """Stop, with advice, where nothing can be learned."""
        limit = self.settings.watchdog_steps
        self._without_signal = self._without_signal + 1 if record["groups_with_spread_share"] == 0 else 0
        self._all_cut = self._all_cut + 1 if record["truncated_share"] == 1 else 0
        if self._all_cut >= limit:
            self.checkpoint()
            raise TrainingError(
                f"every completion of the last {limit} steps was cut at rollouts.max_new_tokens = "
                f"{self.settings.rollouts.max_new_tokens}: raise it, or train the answer's format first (instep sft)"
            )
        if self._without_signal >= limit:
            self.checkpoint()
            raise TrainingError(
                f"no group of the last {limit} steps had rewards that differ (mean reward {record['reward']:.3g}): "
                "choose easier or harder tasks, a larger rollouts.group_size, or a reward that tells completions apart"
            )

    def close(self) -> None:
        super().close()
        self._table.close()

    def evaluate(self, stop: StopFlag) -> dict[str, float] | None:
        """Greedy completions of held-out tasks: mean rewards by name, lengths, share cut."""
        settings, began = self.settings, time.perf_counter()
        sampling = replace(
            sampling_of(settings.rollouts, self.data.renderer.stop_tokens, settings.seed), temperature=0.0
        )
        groups: list[Group] = []
        size = max(1, settings.tasks_per_step * settings.rollouts.group_size)
        for start in range(0, len(self._held_out), size):
            if stop.requested:
                return None
            self.listener.phase("evaluating", start, len(self._held_out))
            tasks = self._held_out[start : start + size]
            keys = [HELD_OUT_KEY + start + index for index in range(len(tasks))]
            try:
                sampled = sample_rollouts(
                    self.engine, self.data.renderer, tasks, 1, sampling, keys, settings.rollouts.stop_strings,
                    on_token=stop.check,
                )  # fmt: skip
            except Stopped:
                return None
            groups += score_groups(self.data.rewards, tasks, sampled, settings.rewards, False)
        metrics = reward_metrics(groups, settings.rewards)
        del metrics["groups_with_spread_share"], metrics["reward_std"]
        result = {name: value for name, value in metrics.items() if np.isfinite(value)}
        self.tell_validation(
            {
                "split": self.data.tasks.test.name,
                **result,
                "tasks": len(groups),
                "seconds": time.perf_counter() - began,
            }
        )
        by_id = {task.id: task for task in self._held_out[: len(groups)]}
        held_out = rollout_records(groups[:SHOWN_HELD_OUT], by_id, self.progress.step, settings.rewards)
        for text in [*map(sample_note, best_and_worst(self._latest)), *map(sample_note, held_out)]:
            self.listener.note(text)
        return result


def best_and_worst(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rollouts of one group whose advantages are furthest apart; none where no group has spread."""
    if not any(record["advantage"] for record in records):
        return []
    high = max(records, key=lambda record: record["advantage"])
    group = [record for record in records if record["task"] == high["task"]]
    return [high, min(group, key=lambda record: record["advantage"])]


def sample_note(record: dict[str, Any]) -> str:
    """A rollout in two or three short lines, for the console."""
    rewards = ", ".join(
        f"{name.rpartition('/')[2]} {value:.2g}"
        for name, value in record["rewards"].items()
        if value is not None
    )
    advantage = f"; advantage {record['advantage']:+.2f}" if record["advantage"] else ""
    question, completion = (" ".join(record[name].split()) for name in ("question", "completion"))
    shown = f"…{question[-SHOWN_PROMPT:]}" if len(question) > SHOWN_PROMPT else question
    if len(completion) > SHOWN_COMPLETION:
        half = SHOWN_COMPLETION // 2
        completion = f"{completion[:half]} … {completion[-half:]}"
    end = f"{rewards}{advantage} ({record['tokens']} tokens, {record['stop']})"
    return f"{record['task']}: {shown}\n    {completion!r}\n    {end}"


def _objective_metrics(sums: dict[str, float]) -> dict[str, float]:
    """Means over trained tokens; nothing where no group had spread."""
    if not sums.get("sites"):
        return {"loss": 0.0}
    sites = sums["sites"]
    metrics = {
        "loss": sums["loss_mean"],
        "ratio": sums["ratio"] / sites,
        "clip_low_share": sums["clip_low"] / sites,
        "clip_high_share": sums["clip_high"] / sites,
        "log_ratio_mean": sums["log_ratio"] / sites,
        "log_ratio_max": sums["max_log_ratio"],
    }
    if "kl" in sums:
        metrics["kl"] = sums["kl"] / sites
    return metrics
