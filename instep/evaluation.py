"""Statistics of an evaluation: what was measured, and how sure that is."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from instep.rewards.answers import Verdict, canonical


def wilson_interval(successes: float, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a share (Wilson 1927); `successes` may be a fraction (a mean over samples).

    Raises ValueError where there is no trial, or more successes than trials.
    """
    if trials < 1 or not 0 <= successes <= trials or not 0 < confidence < 1:
        raise ValueError(f"{successes} successes of {trials} trials at confidence {confidence}")
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share = successes / trials
    center = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    margin = z / (1 + z * z / trials) * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials**2))
    # At 0 and at all successes the bound is exactly 0 or 1; rounding must not push the share outside.
    return min(max(0.0, center - margin), share), max(min(1.0, center + margin), share)


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k samples is right (Chen et al. 2021, arXiv 2107.03374):
    1 − C(n−c, k) / C(n, k). Raises ValueError where k is more than the samples there are."""
    if not 0 <= correct <= samples or not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {samples} samples, {correct} of them correct")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def majority_at_k(answers: Sequence[str | None], correct: Sequence[bool], k: int) -> float:
    """Whether the most frequent answer among the first k is right (self-consistency, arXiv 2203.11171).

    Answers of the same meaning vote together; None (no answer) does not vote. Among answers that tie, the share
    that is right: what drawing lots would give on average. 0 where nobody votes.
    """
    if len(answers) != len(correct) or not 1 <= k <= len(answers):
        raise ValueError(f"majority@{k} of {len(answers)} answers and {len(correct)} verdicts")
    votes: Counter[str] = Counter()
    right: set[str] = set()
    for answer, good in zip(answers[:k], correct[:k], strict=True):
        if answer is not None:
            key = canonical(answer)
            votes[key] += 1
            if good:
                right.add(key)
    if not votes:
        return 0.0
    most = max(votes.values())
    winners = [key for key, count in votes.items() if count == most]
    return sum(key in right for key in winners) / len(winners)


@dataclass(frozen=True)
class Outcome:
    """One completion of an evaluation, judged."""

    verdict: Verdict
    answer: str | None
    formatted: bool
    """Whether it has the asked-for format (the reward soft_format)."""
    tokens: int
    truncated: bool
    strict: bool = False
    """Whether it has that format and nothing besides (the reward strict_format)."""


def summarise(tasks: Sequence[Sequence[Outcome]], ks: Sequence[int] = ()) -> dict[str, float]:
    """Metrics over tasks, each with the same number n of outcomes (`ks` defaults to n alone).

    accuracy (mean over all completions) with accuracy_low and accuracy_high (95 %), format_rate,
    strict_format_rate, no_answer_rate, mean_tokens, truncated_share, and for n > 1 pass_at_k and majority_at_k of
    each k. The interval takes each task as one
    trial, because completions of one task are not independent. Raises ValueError where there is nothing, or the
    numbers of outcomes differ.
    """
    samples = len(tasks[0]) if tasks else 0
    if samples < 1 or any(len(outcomes) != samples for outcomes in tasks):
        raise ValueError("an evaluation needs tasks, each with the same number of completions")
    everything = [outcome for outcomes in tasks for outcome in outcomes]
    total = len(everything)
    accuracy = sum(outcome.verdict is Verdict.CORRECT for outcome in everything) / total
    low, high = wilson_interval(accuracy * len(tasks), len(tasks))
    metrics = {
        "tasks": float(len(tasks)),
        "samples": float(samples),
        "accuracy": accuracy,
        "accuracy_low": low,
        "accuracy_high": high,
        "format_rate": sum(outcome.formatted for outcome in everything) / total,
        "strict_format_rate": sum(outcome.strict for outcome in everything) / total,
        "no_answer_rate": sum(outcome.verdict is Verdict.NO_ANSWER for outcome in everything) / total,
        "mean_tokens": sum(outcome.tokens for outcome in everything) / total,
        "truncated_share": sum(outcome.truncated for outcome in everything) / total,
    }
    if samples > 1:
        right = [[outcome.verdict is Verdict.CORRECT for outcome in outcomes] for outcomes in tasks]
        for k in ks or (samples,):
            metrics[f"pass_at_{k}"] = sum(pass_at_k(samples, sum(good), k) for good in right) / len(tasks)
            votes = [
                majority_at_k([outcome.answer for outcome in outcomes], good, k)
                for outcomes, good in zip(tasks, right, strict=True)
            ]
            metrics[f"majority_at_{k}"] = sum(votes) / len(tasks)
    return metrics
