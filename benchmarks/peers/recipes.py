"""Rows for both sides, made once by instep: its windows, and the usual recipe of one row per assistant turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from harness import Row

from instep import sessions
from instep.config import DataSettings, ModelSettings, RenderingSettings, SftSettings
from instep.loops.sft_data import SftData, prepare
from instep.records import Sample
from instep.rendering.template import Rendered, Renderer
from instep.rendering.tokenizer import load_tokenizer

CONTEXT_MESSAGES = 18


@dataclass(frozen=True)
class TurnRows:
    """One row per assistant turn. `dropped` turns do not fit `max_length` with their context."""

    rows: list[Row]
    turns: int
    dropped: int


def row_of(sample: Sample) -> Row:
    """Refuses weights other than 0 and 1: the peer has no such thing, so the two would train differently."""
    if not np.isin(sample.weight, (0.0, 1.0)).all():
        raise ValueError("a sample has loss weights other than 0 and 1")
    return Row(sample.tokens.tolist(), (sample.weight > 0).tolist())


def settings(
    model: Path, data: Path, max_length: int, held_out_share: float, rows_per_step: int, seed: int
) -> SftSettings:
    """What `instep sft` is given; all else is its default (a quarter of context, packing)."""
    return SftSettings(
        seed=seed,
        model=ModelSettings(path=str(model)),
        data=DataSettings(path=str(data), validation_share=held_out_share),
        rendering=RenderingSettings(max_length=max_length),
        rows_per_step=rows_per_step,
    )


def windowed(wanted: SftSettings) -> SftData:
    """instep's own way from sessions to samples and their order, the same as in `instep sft`."""
    return prepare(wanted)


def turn_rows(
    model: Path,
    data: Path,
    train: Sequence[Sample],
    max_length: int,
    context_messages: int = CONTEXT_MESSAGES,
) -> TurnRows:
    """One row for every assistant turn that `train` supervises: the system prompt, at most so many messages of
    context, the turn. A row of more than `max_length` tokens is dropped, as this recipe does it.
    """
    renderer = Renderer(load_tokenizer(model))
    trained = {(sample.conversation, turn) for sample in train for turn in sample.turns}
    rows: list[Row] = []
    done: set[tuple[str, int]] = set()
    for conversation in sessions.load(data)[0]:
        for rendered in renderer.render(conversation):
            for turn in sorted({int(m) for m in rendered.message[rendered.weight > 0]}):
                key = (conversation.id, turn)
                if key in trained and key not in done:
                    done.add(key)
                    rows.extend(_row(rendered, turn, context_messages, max_length))
    if done != trained:
        raise ValueError(f"{len(trained - done)} supervised turns of the windows were not found again")
    return TurnRows(rows, len(done), len(done) - len(rows))


def _row(rendered: Rendered, turn: int, context_messages: int, max_length: int) -> list[Row]:
    """The row of one turn, or none where it is too long."""
    own = np.flatnonzero(rendered.message == turn)
    start = int(np.flatnonzero(rendered.message >= max(0, turn - context_messages))[0])
    last = int(own[rendered.weight[own] > 0][-1])
    at = np.concatenate([np.arange(rendered.head), np.arange(max(start, rendered.head), last + 1)])
    if len(at) > max_length:
        return []
    supervised = (rendered.weight[at] > 0) & (rendered.message[at] == turn)
    return [Row(rendered.tokens[at].tolist(), supervised.tolist())]


def rows_with_share(samples: Sequence[Sample], count: int, share: float) -> list[Row]:
    """`count` rows out of the longer half of the samples whose supervised share is nearest to `share`, in the
    samples' order. Both sides get the very same rows, so the choice favours none."""
    longer = sorted(range(len(samples)), key=lambda i: (-len(samples[i]), i))[: max(count, len(samples) // 2)]

    def distance(index: int) -> float:
        return abs(float((samples[index].weight > 0).mean()) - share)

    chosen = sorted(sorted(longer, key=lambda i: (distance(i), i))[:count])
    if len(chosen) < count:
        raise ValueError(f"the data gives {len(chosen)} rows, expected {count}: use a longer session")
    return [row_of(samples[index]) for index in chosen]


def shuffled(rows: Sequence[Row], seed: int) -> list[Row]:
    return [rows[index] for index in np.random.default_rng(seed).permutation(len(rows))]


def row_of_length(model: Path, data: Path, length: int) -> Row:
    """The stretch of `length` tokens of the first conversation that is long enough whose supervised share is
    nearest to the whole conversation's, so that rows of several lengths differ in nothing but length."""
    renderer = Renderer(load_tokenizer(model))
    for conversation in sessions.load(data)[0]:
        for rendered in renderer.render(conversation):
            if len(rendered) > length:
                marks = rendered.weight > 0
                counts = np.concatenate([[0], np.cumsum(marks)])
                shares = (counts[length:] - counts[:-length]) / length
                start = int(np.abs(shares - marks.mean()).argmin())
                supervised = marks[start : start + length].copy()
                supervised[0] = False
                return Row(rendered.tokens[start : start + length].tolist(), supervised.tolist())
    raise ValueError(f"no conversation has more than {length} tokens: use a longer session")
