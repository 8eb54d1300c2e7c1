"""The rows of a generation: which completions are under way, what each has drawn, why it ended. numpy only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from instep.engines.base import Sampling
from instep.engines.sampling import draw, uniforms
from instep.records import Rollout, StopReason


@dataclass
class Row:
    """One completion under way: sample `sample` of prompt `prompt`, and its uniforms float64 [max_new_tokens]."""

    prompt: int
    sample: int
    uniform: np.ndarray
    ids: list[int] = field(default_factory=list)
    logprob: list[float] = field(default_factory=list)
    stop: StopReason | None = None

    def rollout(self) -> Rollout:
        return Rollout(
            np.array(self.ids, np.int32), np.array(self.logprob, np.float32), self.stop or StopReason.LENGTH
        )


def rows_of(prompts: int, n: int, sampling: Sampling, keys: Sequence[int]) -> list[Row]:
    """n rows for each prompt, prompt by prompt; `keys` name the prompts for the seed."""
    return [
        Row(prompt, sample, uniforms(sampling.seed, keys[prompt], sample, sampling.max_new_tokens))
        for prompt in range(prompts)
        for sample in range(n)
    ]


def advance(
    rows: Sequence[Row],
    logits: np.ndarray,
    sampling: Sampling,
    stop_text: Callable[[np.ndarray], bool] | None,
    on_token: Callable[[int, int, int], None] | None,
) -> None:
    """Draw each row's next token from its logits (float32 [B, V]), and note where that ends it."""
    ids, logprob = draw(logits, np.array([row.uniform[len(row.ids)] for row in rows]), sampling)
    for row, token, value in zip(rows, ids.tolist(), logprob.tolist(), strict=True):
        row.ids.append(token)
        row.logprob.append(value)
        if on_token is not None:
            on_token(row.prompt, row.sample, token)
        if token in sampling.stop_tokens:
            row.stop = StopReason.END_OF_TURN
        elif stop_text is not None and stop_text(np.array(row.ids, np.int32)):
            row.stop = StopReason.STOP_STRING
        elif len(row.ids) >= sampling.max_new_tokens:
            row.stop = StopReason.LENGTH
