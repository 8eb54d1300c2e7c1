"""Windows: slices of a long conversation, each supervised token in exactly one of them.

A window is the head (system prompt and tool schemas), some context that is not supervised, then new messages.
Which turns share a window is chosen by dynamic programming, so that the tokens processed are as few as the
floor of context allows; a long stretch that nobody is trained on (a tool result that was read once) is then
skipped but for its end.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from instep.errors import InputError
from instep.records import Sample
from instep.rendering.template import Rendered

_HEAD_SHARE = 2
"""A head longer than max_length over this is clipped …"""
_CLIPPED_HEAD_SHARE = 4
"""… to max_length over this."""
_SLACK_SHARE = 4
"""Context may be longer than its floor by so much of it (one over), to start where a message starts."""


@dataclass(frozen=True)
class _Piece:
    """Supervised tokens [start, end) that stay together, and where the context before them starts."""

    start: int
    end: int
    context: int


def kept_head(rendered: Rendered, max_length: int) -> np.ndarray:
    """Positions of the head's tokens that each window repeats, int64.

    A head of more than half of `max_length` is clipped to a quarter of it: its first and its last tokens stay
    (the opening of the system prompt, the end of the tool schemas, the template's own frame).
    """
    if rendered.head * _HEAD_SHARE <= max_length:
        return np.arange(rendered.head)
    kept = max_length // _CLIPPED_HEAD_SHARE
    first = (kept + 1) // 2
    return np.concatenate([np.arange(first), np.arange(rendered.head - (kept - first), rendered.head)])


@dataclass(frozen=True)
class Window:
    """Places in the rendered conversation int64 [T], the first `head` of them the repeated head, and the loss
    weight of each float32 [T]."""

    places: np.ndarray
    weight: np.ndarray
    head: int


def plan_windows(rendered: Rendered, max_length: int, min_context: int) -> list[Window]:
    """Which places of a rendered conversation each window holds; see `windows`."""
    supervised = np.flatnonzero(rendered.weight > 0)
    if len(supervised) == 0:
        return []
    head = kept_head(rendered, max_length)
    floor = max(min_context, 0 if len(head) else 1)
    room = max_length - len(head) - floor
    if room < 1:
        raise InputError(
            f"max_length {max_length} leaves no room beside a head of {len(head)} and min_context {min_context} tokens;"
            f" use a min_context below {max_length - len(head)} or a larger max_length"
        )
    pieces = _pieces(rendered, supervised, floor, room, max_length - len(head))
    planned = []
    for first, last in _grouped(pieces, len(head), max_length):
        start, end, context = pieces[first].start, pieces[last].end, pieces[first].context
        places = np.concatenate([head, np.arange(context, end)])
        weight = np.where(places >= start, rendered.weight[places], 0).astype(np.float32)
        planned.append(Window(places, weight, len(head)))
    return planned


def windows(rendered: Rendered, max_length: int, min_context: int) -> list[Sample]:
    """Cut a rendered conversation into samples of at most `max_length` tokens.

    Every supervised token is supervised in exactly one sample, in order, after the head and at least
    `min_context` tokens (or all there are). A turn longer than fits is split. A sample ends with its last
    supervised token; none is without one. Raises InputError where head and context leave no room.
    """
    samples = []
    for window in plan_windows(rendered, max_length, min_context):
        turns = np.unique(rendered.message[window.places[window.weight > 0]])
        tokens = rendered.tokens[window.places]
        samples.append(Sample(tokens, window.weight, rendered.conversation, tuple(turns.tolist())))
    return samples


def _pieces(
    rendered: Rendered, supervised: np.ndarray, floor: int, room: int, slice_length: int
) -> list[_Piece]:
    """The runs of supervised tokens of one message; a run longer than `room` in equal parts."""
    message = rendered.message[supervised]
    breaks = np.flatnonzero((np.diff(supervised) > 1) | (np.diff(message) != 0)) + 1
    starts_of_messages = np.flatnonzero(np.diff(rendered.message, prepend=rendered.message[0] - 1) != 0)
    pieces = []
    for run in np.split(supervised, breaks):
        parts = -(-len(run) // room)
        for part in np.array_split(run, parts):
            start, end = int(part[0]), int(part[-1]) + 1
            context = max(rendered.head, start - floor)
            limit = max(rendered.head, context - floor // _SLACK_SHARE, end - slice_length)
            earlier = starts_of_messages[np.searchsorted(starts_of_messages, context, side="right") - 1]
            pieces.append(_Piece(start, end, int(earlier) if limit <= earlier <= context else context))
    return pieces


def _grouped(pieces: list[_Piece], head: int, max_length: int) -> list[tuple[int, int]]:
    """(first, last) piece of each window: fewest tokens in all, then fewest windows.

    Conversations have at most a few thousand pieces and a window holds some tens, so this takes milliseconds.
    """
    best: list[tuple[int, int]] = [(0, 0)]
    choice: list[int] = []
    for last in range(len(pieces)):
        options = []
        for first in range(last, -1, -1):
            length = head + pieces[last].end - pieces[first].context
            if length > max_length and first < last:
                break
            tokens, count = best[first]
            options.append((tokens + length, count + 1, first))
        tokens, count, first = min(options)
        best.append((tokens, count))
        choice.append(first)
    groups = []
    last = len(pieces) - 1
    while last >= 0:
        groups.append((choice[last], last))
        last = choice[last] - 1
    return groups[::-1]
