"""Where each message stands in a rendered text, and which characters the loss is taken on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from instep.records import Message, StopReason
from instep.rendering.dialect import Dialect
from instep.rendering.marks import Item
from instep.rendering.turns import NO_MESSAGE, Owner, Turn

UNFINISHED = frozenset({StopReason.LENGTH, StopReason.ABORTED, StopReason.ERROR, StopReason.STOP_STRING})
"""Turns that did not end with an end-of-turn token, so that none is supervised."""


@dataclass(frozen=True)
class Rendering:
    """Text of a conversation: `text` with look-alikes of control tokens shielded, and the wrapped fields in it."""

    text: str
    items: tuple[Item, ...]
    owners: Sequence[Owner]

    def owner(self, item: Item) -> Owner:
        return self.owners[item.ordinal]


@dataclass(frozen=True)
class Production:
    """What the assistant produced in one turn, as places in the text."""

    turn: int
    prompt_end: int
    """End of the generation prompt."""
    start: int
    """Later than `prompt_end` where the template writes something first that nobody said (an empty thought)."""
    stop_start: int
    """Before the end-of-turn token."""
    end: int
    """After the end-of-turn token."""
    items: tuple[Item, ...] = ()

    @property
    def cuts(self) -> tuple[int, int, int, int]:
        return self.prompt_end, self.start, self.stop_start, self.end


@dataclass(frozen=True)
class Supervised:
    start: int
    end: int
    message: int


def productions(
    rendering: Rendering, turns: Sequence[Turn], dialect: Dialect, only: int | None = None
) -> list[Production]:
    """The assistant turns (or only one) that show something and are framed as the layout says, in order.

    Look-alikes are shielded, so the first stop token after a turn's fields is its own.
    """
    fields: dict[int, list[Item]] = {}
    for item in rendering.items:
        turn = rendering.owner(item).turn
        if turns[turn].role == "assistant" and only in (None, turn):
            fields.setdefault(turn, []).append(item)
    found = []
    for turn, items in fields.items():
        kind = rendering.owner(items[0]).kind
        layout = dialect.layout(kind)
        prompt_end = items[0].start - len(layout.lead)
        stop_start = rendering.text.find(layout.stop, items[-1].end)
        if prompt_end <= 0 or stop_start < 0 or not rendering.text.startswith(layout.lead, prompt_end):
            continue
        scaffold = kind == "content" and bool(layout.lead.strip())
        start = items[0].start if scaffold else prompt_end
        end = stop_start + len(layout.stop)
        found.append(Production(turn, prompt_end, start, stop_start, end, tuple(items)))
    return found


def supervised(
    production: Production, rendering: Rendering, turn: Turn, messages: Sequence[Message]
) -> list[Supervised]:
    """The character ranges of one turn that the loss is taken on: what its supervised messages said.

    Where one turn joins several messages, each counts by its own `supervised`, the text that joins them by none,
    and the end-of-turn token by the last.
    """
    ranges: list[Supervised] = []
    start = production.start
    message = rendering.owner(production.items[0]).message if production.items else turn.last_message
    end = start
    for item in production.items:
        following = rendering.owner(item).message
        if following != message:
            ranges.append(Supervised(start, end, message))
            start, message = item.start, following
        end = item.end
    ranges.append(Supervised(start, production.stop_start, message))
    if messages[message].stop not in UNFINISHED:
        ranges.append(Supervised(production.stop_start, production.end, message))
    return [one for one in ranges if one.end > one.start and messages[one.message].supervised]


@dataclass(frozen=True)
class Places:
    """`starts[k]` … `starts[k+1]` belongs to message `owner[k]`; the head ends at character `head`."""

    starts: list[int]
    owner: list[int]
    head: int


def places(
    rendering: Rendering,
    found: Sequence[Production],
    turns: Sequence[Turn],
    messages: Sequence[Message],
    dialect: Dialect,
    bos: str,
) -> Places:
    """Give every character to a message: role header, text and end-of-turn go together.

    What stands before the first message that is not a system message is the head: there only the system
    message's own text has an owner, the rest (schemas, an injected prompt, a beginning-of-text token) has none.
    """
    begin = len(bos) if bos and rendering.text.startswith(bos) else 0
    if not rendering.items:
        return _places_without_fields(found, turns, begin)
    stop = dialect.layout("content").stop
    prompt_end = {production.turn: production.prompt_end for production in found}
    starts, owner = [0], [NO_MESSAGE]
    head: int | None = None
    previous_end, previous, previous_turn = 0, NO_MESSAGE, NO_MESSAGE
    for item in rendering.items:
        who = rendering.owner(item)
        if head is None and (who.message < 0 or messages[who.message].role == "system"):
            starts += [item.start, item.end]
            owner += [who.message, NO_MESSAGE]
        elif head is None or who.message != previous:
            limit = item.start if who.turn == previous_turn else prompt_end.get(who.turn, item.start)
            border = _border(rendering.text, previous_end, limit, stop, last=head is None)
            if border is None:
                border = begin if head is None and previous_end == 0 else limit
            head = border if head is None else head
            starts.append(border)
            owner.append(who.message)
        previous_end, previous, previous_turn = item.end, who.message, who.turn
    return Places(starts, owner, len(rendering.text) if head is None else head)


def _places_without_fields(found: Sequence[Production], turns: Sequence[Turn], begin: int) -> Places:
    """Only the trained turns are known: what lies between them goes to the message before each."""
    starts, owner = [0], [NO_MESSAGE]
    at = begin
    for production in found:
        before = turns[production.turn - 1].last_message if production.turn else NO_MESSAGE
        starts += [at, production.prompt_end]
        owner += [before, turns[production.turn].last_message]
        at = production.end
    return Places(starts, owner, begin)


def _border(text: str, start: int, end: int, stop: str, last: bool) -> int | None:
    """Between two messages: after the stop token of the first, and the white space that follows it."""
    found = text.rfind(stop, start, end) if last else text.find(stop, start, end)
    if found < 0:
        return None
    border = found + len(stop)
    while border < end and text[border].isspace():
        border += 1
    return border
