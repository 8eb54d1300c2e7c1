"""Tasks → groups of scored rollouts → batches of one optimizer step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from instep.advantages import combine, group_relative, has_spread
from instep.batching import collate
from instep.config import GrpoObjectiveSettings, RewardSettings, RolloutSettings
from instep.engines.base import Engine, Sampling, ShapeRules
from instep.objectives import loss_weights
from instep.records import Batch, Group, Rollout, Sample, StopReason
from instep.rendering.template import Renderer
from instep.rewards import Rewards
from instep.tasks import Task


def sampling_of(settings: RolloutSettings, stop_tokens: tuple[int, ...], seed: int) -> Sampling:
    return Sampling(
        max_new_tokens=settings.max_new_tokens,
        temperature=settings.temperature,
        stop_tokens=stop_tokens,
        seed=seed,
    )


def text_of(tokenizer: Any, rollout: Rollout, stop_tokens: Sequence[int]) -> str:
    """The completion's text, without the stop token that ended it."""
    ids = rollout.tokens.tolist()
    if ids and ids[-1] in stop_tokens:
        ids = ids[:-1]
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def stop_on_text(tokenizer: Any, strings: Sequence[str]) -> Callable[[np.ndarray], bool] | None:
    """Whether the ids so far end a completion by text; None where there is no stop string."""
    if not strings:
        return None
    # A stop string may begin inside a token: so many last tokens surely hold it, and two more for the border.
    reach = max(len(text.encode("utf-8")) for text in strings) + 2

    def stops(ids: np.ndarray) -> bool:
        tail = tokenizer.decode(ids[-reach:].tolist(), skip_special_tokens=False)
        return any(text in tail for text in strings)

    return stops


def sample_rollouts(
    engine: Engine,
    renderer: Renderer,
    tasks: Sequence[Task],
    n: int,
    sampling: Sampling,
    keys: Sequence[int],
    stop_strings: Sequence[str] = (),
    adapter: bool = True,
    on_token: Callable[[int, int, int], None] | None = None,
) -> list[tuple[np.ndarray, list[Rollout]]]:
    """(prompt int32 [P], its n rollouts with their text) of each task.

    `on_token(task, sample, id)` is called at each token; what it raises ends the sampling.
    """
    prompts = [renderer.prompt(task.messages, task.tools) for task in tasks]
    stop_text = stop_on_text(renderer.tokenizer, stop_strings)
    sampled = engine.generate(
        prompts, n, sampling, keys=keys, stop_text=stop_text, on_token=on_token, adapter=adapter
    )
    return [
        (prompt, [replace(r, text=text_of(renderer.tokenizer, r, sampling.stop_tokens)) for r in rollouts])
        for prompt, rollouts in zip(prompts, sampled, strict=True)
    ]


def score_groups(
    rewards: Rewards,
    tasks: Sequence[Task],
    sampled: Sequence[tuple[np.ndarray, list[Rollout]]],
    settings: RewardSettings,
    scale_by_std: bool,
) -> list[Group]:
    """Rewards and advantages of every group. Raises TrainingError from a failing reward."""
    flat_tasks = [task for task, (_, rollouts) in zip(tasks, sampled, strict=True) for _ in rollouts]
    flat = [rollout for _, rollouts in sampled for rollout in rollouts]
    values = rewards.score(flat_tasks, flat)
    groups, start = [], 0
    for task, (prompt, rollouts) in zip(tasks, sampled, strict=True):
        part = {name: value[start : start + len(rollouts)] for name, value in values.items()}
        start += len(rollouts)
        total = combine(part, settings.weight)
        groups.append(Group(task.id, prompt, tuple(rollouts), part, group_relative(total, scale_by_std)))
    return groups


def total_reward(group: Group, settings: RewardSettings) -> np.ndarray:
    """Weighted reward of each rollout as it enters the advantage, float64 [G]."""
    return combine(group.rewards, settings.weight)


def has_signal(group: Group, settings: RewardSettings) -> bool:
    return has_spread(total_reward(group, settings))


def is_masked(rollout: Rollout, settings: GrpoObjectiveSettings) -> bool:
    """Whether a completion cut at max_new_tokens is left out of the loss."""
    return settings.truncated == "mask" and rollout.stop is StopReason.LENGTH


@dataclass(frozen=True)
class RolloutBatch:
    """One micro-batch: rollouts of one group behind their shared prefix."""

    batch: Batch
    task: str


def make_batches(
    groups: Sequence[Group],
    objective: GrpoObjectiveSettings,
    rewards: RewardSettings,
    max_new_tokens: int,
    tokens_per_batch: int,
    rules: ShapeRules,
) -> tuple[list[RolloutBatch], float]:
    """(micro-batches, denominator) of one step.

    Groups without spread give no batch but count in the denominator, as do the weights of `loss_weights`. The
    prompt without its last token is the prefix that all rows of a micro-batch continue.
    """
    lengths = [
        0 if is_masked(rollout, objective) else len(rollout.tokens)
        for group in groups
        for rollout in group.rollouts
    ]
    weights, denominator = loss_weights(objective.variant, lengths, max_new_tokens)
    batches, start = [], 0
    for group in groups:
        own = weights[start : start + len(group.rollouts)]
        start += len(group.rollouts)
        if not has_signal(group, rewards):
            continue
        samples = [_sample(group, index, weight) for index, weight in enumerate(own) if weight > 0]
        samples.sort(key=len)
        for part in _budgeted(samples, tokens_per_batch):
            batch = collate([[sample] for sample in part], rules, prefix=group.prompt[:-1])
            batches.append(RolloutBatch(batch, group.task))
    return batches, denominator


def _sample(group: Group, index: int, weight: float) -> Sample:
    """The last prompt token and the completion, every sampled token weighted."""
    rollout = group.rollouts[index]
    assert group.advantage is not None
    count = len(rollout.tokens) + 1

    def behind(values: np.ndarray | float) -> np.ndarray:
        out = np.zeros(count, np.float32)
        out[1:] = values
        return out

    return Sample(
        tokens=np.concatenate([group.prompt[-1:], rollout.tokens]).astype(np.int32),
        weight=behind(weight),
        conversation=group.task,
        behaviour_logprob=behind(rollout.logprob),
        advantage=behind(float(group.advantage[index])),
    )


def _budgeted(samples: Sequence[Sample], tokens_per_batch: int) -> list[list[Sample]]:
    """Samples, sorted by length, in parts whose padded size stays within the budget (at least one a part)."""
    parts: list[list[Sample]] = []
    for sample in samples:
        if parts and (len(parts[-1]) + 1) * len(sample) <= tokens_per_batch:
            parts[-1].append(sample)
        else:
            parts.append([sample])
    return parts


def with_reference(batch: RolloutBatch, engine: Engine, temperature: float) -> RolloutBatch:
    """The micro-batch with the reference model's log-probabilities: the adapter off."""
    scores = engine.score(batch.batch, temperature, adapter=False)
    return replace(batch, batch=replace(batch.batch, reference_logprob=scores.logprob))


def reward_metrics(groups: Sequence[Group], settings: RewardSettings) -> dict[str, float]:
    """Means over the rollouts of a step: every reward by its name, the total, lengths, ends, spread."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    totals = np.concatenate([total_reward(group, settings) for group in groups])
    metrics = {"reward": _mean(totals), "reward_std": float(np.nanstd(totals)) if len(totals) else 0.0}
    for name in groups[0].rewards:
        metrics[f"reward/{name}"] = _mean(np.concatenate([group.rewards[name] for group in groups]))
    lengths = [len(rollout.tokens) for rollout in rollouts]
    metrics["completion_tokens_mean"] = float(np.mean(lengths))
    metrics["truncated_share"] = float(np.mean([r.stop is StopReason.LENGTH for r in rollouts]))
    metrics["groups_with_spread_share"] = float(np.mean([has_signal(group, settings) for group in groups]))
    return metrics


def _mean(values: np.ndarray) -> float:
    """NaN where no value applies: logged as null."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else math.nan


def rollout_records(
    groups: Sequence[Group], tasks: Mapping[str, Task], step: int, settings: RewardSettings
) -> list[dict[str, Any]]:
    """One record a rollout, as they go to rollouts.jsonl."""
    records = []
    for group in groups:
        totals = total_reward(group, settings)
        for index, rollout in enumerate(group.rollouts):
            advantage = 0.0 if group.advantage is None else float(group.advantage[index])
            records.append(
                {
                    "step": step,
                    "task": group.task,
                    "question": tasks[group.task].question,
                    "answer": tasks[group.task].answer,
                    "completion": rollout.text,
                    "tokens": len(rollout.tokens),
                    "stop": rollout.stop.value,
                    "rewards": {
                        name: None if math.isnan(values[index]) else float(values[index])
                        for name, values in group.rewards.items()
                    },
                    "reward": None if math.isnan(totals[index]) else float(totals[index]),
                    "advantage": advantage,
                }
            )
    return records
