"""A rendered conversation as runs of text for people: what each message shows the model, and what is trained."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from instep.records import Message
from instep.rendering.template import Rendered
from instep.rendering.windows import Window

_INVISIBLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")
"""Control characters, line and paragraph separators, and marks without a width or that turn the direction."""
_BLANK_ENDS = re.compile(r"[ ]+(?=\n|$)|^[ ]+")


@dataclass(frozen=True)
class Run:
    """Neighbouring tokens of one message with one loss weight; a control token of the template by itself."""

    text: str
    weight: float
    control: bool
    tokens: int


@dataclass(frozen=True)
class Block:
    """The runs of one message (-1: of none) in a row."""

    message: int
    role: str
    repeated: bool
    """Part of the head that a later window repeats."""
    runs: tuple[Run, ...]

    @property
    def supervised_tokens(self) -> int:
        return sum(run.tokens for run in self.runs if run.weight > 0)


@dataclass(frozen=True)
class Sheet:
    """One token sequence: a rendering, or one window of it."""

    title: str
    tokens: int
    supervised_tokens: int
    blocks: tuple[Block, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def sheet_of_rendering(rendered: Rendered, messages: Sequence[Message], tokenizer: Any, title: str) -> Sheet:
    places = np.arange(len(rendered))
    return _sheet(rendered, places, rendered.weight, 0, messages, tokenizer, title)


def sheet_of_window(
    window: Window, rendered: Rendered, messages: Sequence[Message], tokenizer: Any, title: str, repeats: bool
) -> Sheet:
    """`repeats` says that an earlier window has shown the head already."""
    head = window.head if repeats else 0
    return _sheet(rendered, window.places, window.weight, head, messages, tokenizer, title)


def _sheet(
    rendered: Rendered,
    places: np.ndarray,
    weight: np.ndarray,
    head: int,
    messages: Sequence[Message],
    tokenizer: Any,
    title: str,
) -> Sheet:
    special = np.isin(rendered.tokens[places], list(tokenizer.added_tokens_decoder))
    blocks = []
    for start, end in _stretches([rendered.message[places], np.arange(len(places)) < head]):
        message = int(rendered.message[places[start]])
        runs = []
        for a, b in _stretches([weight[start:end], special[start:end], _jumps(places[start:end])]):
            inside = slice(start + a, start + b)
            ids = rendered.tokens[places[inside]].tolist()
            parts = [[one] for one in ids] if special[start + a] else [ids]
            for part in parts:
                text = tokenizer.decode(part, skip_special_tokens=False, clean_up_tokenization_spaces=False)
                runs.append(Run(text, float(weight[start + a]), bool(special[start + a]), len(part)))
        role = messages[message].role if message >= 0 else "template"
        blocks.append(Block(message, role, start < head, tuple(runs)))
    return Sheet(title, len(places), int((weight > 0).sum()), tuple(blocks))


def _jumps(places: np.ndarray) -> np.ndarray:
    """A number that grows where tokens were left out."""
    return np.cumsum(np.diff(places, prepend=places[:1] - 1) != 1)


def _stretches(keys: Iterable[np.ndarray]) -> Iterator[tuple[int, int]]:
    """(start, end) of the longest stretches over which all keys stay the same."""
    columns = list(keys)
    length = len(columns[0])
    if length == 0:
        return
    changes = np.zeros(length, bool)
    for column in columns:
        changes[1:] |= column[1:] != column[:-1]
    starts = [0, *np.flatnonzero(changes).tolist()]
    yield from zip(starts, [*starts[1:], length], strict=True)


def visible(text: str) -> str:
    """The text with line ends, tabs, blanks at line ends and characters that cannot be seen made visible.

    It holds no control character but the line end, so a session cannot steer the terminal that shows it.
    """
    text = _BLANK_ENDS.sub(lambda match: "·" * len(match[0]), text)
    text = _INVISIBLE.sub(_name, text)
    return text.replace("\t", "→\t").replace("\n", "↵\n")


def _name(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(0x2400 + code)
    return "␡" if code == 0x7F else f"⟨U+{code:04X}⟩"
