"""Conversations → samples of the two splits, with an account of every assistant turn.

No weights are loaded here: a dry run ends with this.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from instep import models, sessions
from instep.batching import Order, fingerprint, make_order
from instep.config import SftSettings
from instep.errors import InputError
from instep.plan import LONGEST_BY_CHOICE, choose_row_length, setup_of
from instep.records import Conversation, Sample, StopReason
from instep.rendering.base_models import describe_loan
from instep.rendering.template import Rendered, Renderer
from instep.rendering.tokenizer import load_tokenizer
from instep.rendering.windows import windows
from instep.tasks import demonstration, load_tasks, tags_of

REFUSED = "in a conversation that the chat template fails on"
FAR_FROM_GOAL = 2.0
"""Whole sessions are held out where they give between 1/2 and 2 times the share that is asked for."""


@dataclass(frozen=True)
class Split:
    samples: list[Sample]
    report: dict[str, Any]


@dataclass(frozen=True)
class SftData:
    model_folder: Path
    train: Split
    validation: Split
    order: Order
    validation_order: Order
    row_length: int
    fingerprint: str
    choices: dict[str, str]
    read: dict[str, Any] | None = None
    """The report of reading `data.path`: what was quarantined, redacted and left out before any conversation."""

    def report(self) -> dict[str, Any]:
        """The dry run's object: one entry per split, and the choices with their reasons."""
        return {
            "train": self.train.report,
            "validation": self.validation.report,
            "row_length": self.row_length,
            "steps_per_epoch": self.order.steps_per_epoch,
            "fingerprint": self.fingerprint,
            "choices": self.choices,
            "read": self.read,
        }


@dataclass(frozen=True)
class _Part:
    """What one split is made from: a conversation's renderings and the turns they are to account for."""

    conversation: Conversation
    rendered: list[Rendered]
    turns: frozenset[int]
    refused: str | None = None
    """Why the template gives no rendering of it."""


def prepare(settings: SftSettings) -> SftData:
    """Read, render, split, cut and pack. Raises InputError where nothing is left to train on."""
    folder = models.resolve(settings.model.path, settings.model.revision)
    config = models.decoder_config(folder)
    context = _context(settings, config)
    renderer = Renderer(load_tokenizer(folder), settings.rendering.include_reasoning)
    conversations, where, read = _training_conversations(settings)
    # A template that rewrites earlier turns gives one rendering a turn: no longer than a window can be.
    reach = settings.rendering.max_length or min(context, LONGEST_BY_CHOICE)
    train = _render(renderer, conversations, where, reach)
    if settings.data.validation_path:
        path = settings.data.validation_path
        validation = _render(renderer, sessions.load(path)[0], path, reach)
        how = f"held out: {path}"
    else:
        train, validation, how = hold_out(train, settings.data.validation_share, settings.seed)
    longest = max((len(r.tokens) for part in train + validation for r in part.rendered), default=0)
    row_length, reason = _row_length(settings, config, longest, context)
    min_context = settings.rendering.min_context
    min_context = row_length // 4 if min_context is None else min_context
    if min_context >= row_length:
        raise InputError(
            f"rendering.min_context ({min_context}) leaves no room for new tokens in windows of {row_length}: "
            "lower it or raise rendering.max_length"
        )
    train_samples, validation_samples = (
        [s for part in parts for r in part.rendered for s in windows(r, row_length, min_context)]
        for parts in (train, validation)
    )
    if not train_samples:
        raise InputError(f"{where}: no supervised token is left to train on; see `instep data report`")
    order = make_order(train_samples, row_length, settings.data.pack, settings.rows_per_step, settings.seed)
    held = make_order(validation_samples, row_length, settings.data.pack, 1, settings.seed)
    return SftData(
        model_folder=folder,
        train=Split(train_samples, account(train, train_samples, order)),
        validation=Split(validation_samples, account(validation, validation_samples, held)),
        order=order,
        validation_order=held,
        row_length=row_length,
        fingerprint=fingerprint([*train_samples, *validation_samples]),
        choices={
            "row length": reason,
            "validation": how,
            "context": f"at least {min_context} tokens",
            **describe_loan(renderer.tokenizer),
            **_refusals(train + validation),
        },
        read=read,
    )


def _training_conversations(settings: SftSettings) -> tuple[list[Conversation], str, dict[str, Any] | None]:
    """What is trained on, where it comes from, and what reading it left out."""
    count, path = settings.data.demonstrations, settings.data.path
    if count and settings.task:
        tags = tags_of(settings.task)
        tasks = load_tasks(settings.task, settings.seed).train
        return [demonstration(task, tags) for task in tasks.take(count)], tasks.name, None
    if not path:
        raise InputError("no data: give --data with conversations, session files or a folder of them")
    found, report = sessions.load(path)
    return found, path, report.as_dict()


def _render(
    renderer: Renderer, conversations: Sequence[Conversation], where: str, context: int
) -> list[_Part]:
    """One part for each conversation; one that the template fails on has no rendering and says why.

    Raises InputError where there is none, or the template fails on all.
    """
    parts = []
    for conversation in conversations:
        turns = frozenset(i for i, m in enumerate(conversation.messages) if m.role == "assistant")
        try:
            parts.append(_Part(conversation, renderer.render(conversation, context), turns))
        except InputError as error:
            parts.append(_Part(conversation, [], turns, str(error)))
    if not parts:
        raise InputError(f"{where}: no conversation found; see `instep data report`")
    refusals = [part.refused for part in parts if part.refused]
    if len(refusals) == len(parts):
        raise InputError(refusals[0])
    return parts


def _refusals(parts: Sequence[_Part]) -> dict[str, str]:
    """For the choices that are told: how many conversations were left out, and the first reason."""
    refused = [part.refused for part in parts if part.refused]
    return {"left out": f"{len(refused)} conversations, the first: {refused[0]}"} if refused else {}


def _context(settings: SftSettings, config: dict[str, Any]) -> int:
    """The model's context in tokens. Raises InputError where a longer window is asked for."""
    limit = models.context_length(config)
    if settings.rendering.max_length > limit:
        raise InputError(
            f"rendering.max_length = {settings.rendering.max_length} is beyond the model's context of {limit} "
            "tokens: lower it"
        )
    return limit


def _row_length(settings: SftSettings, config: dict[str, Any], longest: int, context: int) -> tuple[int, str]:
    wanted = settings.rendering.max_length
    if wanted:
        return wanted, f"{wanted}: asked for"
    return choose_row_length(
        config,
        longest,
        context,
        available_bytes=psutil.virtual_memory().available,
        rows=settings.rows_per_batch,
        setup=setup_of(settings),
    )


# --- the held-out split --------------------------------------------------------------------------------------


def hold_out(parts: list[_Part], share: float, seed: int) -> tuple[list[_Part], list[_Part], str]:
    """Split by session, never by turn. Where whole sessions cannot give about `share` of the supervised tokens (a
    single session, or one that outweighs the others), the last part of the largest is held out."""
    if share == 0:
        return parts, [], "none: data.validation_share is 0"
    groups: dict[str, list[_Part]] = {}
    for part in parts:
        groups.setdefault(_session(part.conversation), []).append(part)
    size = {name: sum(map(_supervised, group)) for name, group in groups.items()}
    goal = share * sum(size.values())
    # By a hash of the session's name, so that adding a session moves as few others across as can be.
    names = sorted(groups, key=lambda name: hashlib.sha256(f"{seed}/{name}".encode()).digest())
    held: set[str] = set()
    reached = 0.0
    for name in names:
        if reached < goal and reached + size[name] <= FAR_FROM_GOAL * goal and len(held) < len(groups) - 1:
            held.add(name)
            reached += size[name]
    if reached * FAR_FROM_GOAL >= goal and held:
        train = [p for p in parts if _session(p.conversation) not in held]
        validation = [p for p in parts if _session(p.conversation) in held]
        return train, validation, f"{len(held)} of {len(groups)} sessions"
    largest = max(groups, key=lambda name: size[name])
    own = min(share, 1.0) if len(groups) == 1 else min(goal / size[largest], 0.5) if size[largest] else 0.0
    first, validation = _cut_session(groups[largest], own)
    train = [p for p in parts if _session(p.conversation) != largest] + first
    if len(groups) == 1:
        return train, validation, f"the last {own:.0%} of the only session"
    return (
        train,
        validation,
        (
            f"the last {own:.0%} of the largest of {len(groups)} sessions: whole ones would not give about {share:.0%}"
        ),
    )


def _session(conversation: Conversation) -> str:
    return str(conversation.source.get("session") or conversation.id)


def _supervised(part: _Part) -> float:
    return float(sum((r.weight > 0).sum() for r in part.rendered))


def _cut_session(parts: list[_Part], share: float) -> tuple[list[_Part], list[_Part]]:
    """The conversations of one session, in their order (a compaction begins a new one), cut once: later ones
    may repeat earlier messages as context, so that nothing before the cut is held out."""
    goal = share * sum(_supervised(part) for part in parts)
    train, validation = list(parts), []
    while train and goal > 0:
        part = train.pop()
        size = _supervised(part)
        if size <= goal and train:
            validation.insert(0, part)
        else:
            first, last = _cut_last(part, goal / size if size else 0.0)
            train += [first] if first.rendered else []
            validation = ([last] if last.rendered else []) + validation
            break
        goal -= size
    return train, validation


def _cut_last(part: _Part, share: float) -> tuple[_Part, _Part]:
    """Split one conversation's renderings where `share` of its supervised tokens are still to come."""
    counts = [int((r.weight > 0).sum()) for r in part.rendered]
    keep = (1 - share) * sum(counts)
    if len(part.rendered) > 1:  # one rendering per turn
        before = int(np.searchsorted(np.cumsum(counts), keep, side="right"))
        before = min(max(before, 1), len(counts) - 1)
        first, last = part.rendered[:before], part.rendered[before:]
    elif not counts or counts[0] == 0:
        return part, replace(part, rendered=[])
    else:
        rendered = part.rendered[0]
        token = int(np.searchsorted(np.cumsum(rendered.weight > 0), keep, side="right"))
        message = rendered.message[min(token, len(rendered.message) - 1)]
        starts = np.flatnonzero(rendered.message >= message)
        cut = int(starts[0])
        tail = (rendered.tokens[cut:], rendered.weight[cut:], rendered.message[cut:])
        if not (rendered.weight[:cut] > 0).any() or not (tail[1] > 0).any():
            return part, replace(part, rendered=[])
        head = (
            rendered.tokens[: rendered.head],
            rendered.weight[: rendered.head],
            rendered.message[: rendered.head],
        )
        first = [
            replace(
                rendered,
                tokens=rendered.tokens[:cut],
                weight=rendered.weight[:cut],
                message=rendered.message[:cut],
            )
        ]
        tokens, weight, message_of = (np.concatenate(pair) for pair in zip(head, tail, strict=True))
        last = [replace(rendered, tokens=tokens, weight=weight, message=message_of)]
    held = frozenset(int(m) for r in last for m in np.unique(r.message[r.weight > 0]))
    after = min(held, default=10**9)
    return (
        replace(part, rendered=first, turns=frozenset(t for t in part.turns if t < after)),
        replace(part, rendered=last, turns=frozenset(t for t in part.turns if t >= after)),
    )


# --- the account ---------------------------------------------------------------------------------------------


def account(parts: Iterable[_Part], samples: Sequence[Sample], order: Order) -> dict[str, Any]:
    """Counts of one split; every assistant turn is either supervised or dropped for a named reason."""
    parts = list(parts)
    supervised = {(s.conversation, turn) for s in samples for turn in s.turns}
    dropped: Counter[str] = Counter()
    turns = 0
    for part in parts:
        for turn in part.turns:
            turns += 1
            if (part.conversation.id, turn) not in supervised:
                dropped[REFUSED if part.refused else _why(part.conversation, turn)] += 1
    row_tokens = [sum(len(samples[index]) for index in row) for row in order.rows]
    processed = sum(row_tokens)
    # A row is padded to the longest row of its micro-batch, at most to the longest of all.
    padded = max(row_tokens, default=0) * len(row_tokens)
    target = sum(int((s.weight > 0).sum()) for s in samples)
    return {
        "conversations": len(parts),
        "assistant_turns": turns,
        "supervised_turns": turns - sum(dropped.values()),
        "dropped_turns": dict(dropped),
        "windows": len(samples),
        "rows": len(order.rows),
        "processed_tokens": processed,
        "supervised_tokens": target,
        "processed_per_supervised": round(processed / target, 3) if target else None,
        "padding_share": round(1 - processed / padded, 4) if padded else 0.0,
    }


def _why(conversation: Conversation, turn: int) -> str:
    message = conversation.messages[turn]
    if message.stop in (StopReason.ABORTED, StopReason.ERROR):
        return f"{message.stop.value} by the agent"
    if not message.supervised:
        return "not supervised in the data"
    return "rendered without a token of its own"
