"""What an engine checks before it computes: a batch, a prompt, a state. numpy only.

MLX and GPU kernels do not check indices, so that a foreign id would read foreign memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from instep.engines.base import EngineState
from instep.errors import InputError
from instep.records import Batch


def check_batch(batch: Batch, vocabulary: int) -> None:
    """Raise InputError where an index is out of range, or positions are not those that `Batch` describes."""
    for name, ids in (("token", batch.tokens), ("label", batch.label), ("prefix token", batch.prefix)):
        if ids is not None and ids.size and (ids.min() < 0 or ids.max() >= vocabulary):
            worst = int(ids.max()) if ids.max() >= vocabulary else int(ids.min())
            raise InputError(
                f"{name} id {worst} is outside the model's vocabulary of {vocabulary}: "
                "the tokenizer belongs to another model"
            )
    if batch.site.size and (batch.site.min() < 0 or batch.site.max() >= batch.tokens.size):
        raise InputError(
            f"a site lies outside the batch's {batch.tokens.size} tokens: the batch is malformed"
        )
    first = 0 if batch.prefix is None else len(batch.prefix)
    segment, position = batch.segment, batch.position
    opens = np.ones_like(segment, bool)
    opens[:, 1:] = segment[:, 1:] != segment[:, :-1]
    goes_on = position[:, 1:] == position[:, :-1] + 1
    real = segment > 0
    if (position[opens & real] != first).any() or not goes_on[(~opens & real)[:, 1:]].all():
        raise InputError(
            f"positions do not count up from {first} in every segment of a row: the batch is malformed"
        )


def check_prompts(prompts: Sequence[np.ndarray], n: int, max_new_tokens: int, vocabulary: int) -> None:
    """Raise InputError for an empty prompt, one with ids outside the vocabulary, or nothing to sample."""
    for i, prompt in enumerate(prompts):
        if not len(prompt) or prompt.min() < 0 or prompt.max() >= vocabulary:
            raise InputError(f"prompt {i} is empty or has ids outside the model's vocabulary of {vocabulary}")
    if n < 1 or max_new_tokens < 1 or not prompts:
        raise InputError("generate needs at least one prompt, one sample and one new token")


def check_state(state: EngineState, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise InputError where names or shapes differ from `shapes`, or a value is not finite."""
    groups = {
        "parameters": state.parameters,
        "exp_avg": state.exp_avg,
        "exp_avg_sq": state.exp_avg_sq,
    }
    for group, arrays in groups.items():
        missing = sorted(shapes.keys() - arrays.keys())
        foreign = sorted(arrays.keys() - shapes.keys())
        if missing or foreign:
            what = f"{missing[0]} is missing" if missing else f"{foreign[0]} is not in this model"
            raise InputError(
                f"state: {group}: {what} ({len(missing)} missing, {len(foreign)} unknown names): "
                "it belongs to another model or other adapter settings"
            )
        for name, shape in shapes.items():
            if tuple(arrays[name].shape) != tuple(shape):
                raise InputError(
                    f"state: {group}: {name} has shape {list(arrays[name].shape)}, expected {list(shape)}: "
                    "it belongs to another model or another rank"
                )
            if not np.isfinite(arrays[name]).all():
                raise InputError(f"state: {group}: {name} holds values that are not finite")
    if state.step < 0:
        raise InputError(f"state: step is {state.step}, expected 0 or more")
