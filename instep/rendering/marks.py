"""Characters that a rendering carries through the template and loses again.

`wrap` brackets a field so that its place in the rendering is known; `shield` breaks text that looks like a
control token, so that in a rendering every control token that is still whole was written by the template.
Both use Unicode noncharacters, which never stand in real text, and check that they do not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from instep.errors import InputError

_NONCHARACTERS = [
    *range(0xFDD0, 0xFDF0),
    *(plane << 16 | low for plane in range(1, 17) for low in (0xFFFE, 0xFFFF)),
]
_ANY_NONCHARACTER = re.compile("[" + "".join(map(chr, _NONCHARACTERS)) + "]")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_ORDINAL_BASE = 0xF0000
_ORDINAL_DIGITS = 60_000


@dataclass(frozen=True)
class Item:
    """A wrapped field found in a rendering: `text[start:end]`."""

    ordinal: int
    start: int
    end: int


class Marks:
    def __init__(self, control: re.Pattern[str], texts: Iterable[str] = ()) -> None:
        """`control` matches control tokens; `texts` are all texts that will be rendered."""
        taken = {found for text in texts for found in _ANY_NONCHARACTER.findall(text)}
        free = [chr(code) for code in _NONCHARACTERS if chr(code) not in taken]
        if len(free) < 8:
            raise InputError(
                "a conversation uses nearly every Unicode noncharacter; it is no text, leave it out"
            )
        self._open, self._close, *self._shields = free
        self._mark = re.compile(f"[{self._open}{self._close}]")
        self._control = control
        self._shield_of: dict[str, str] = {}

    def shield(self, text: str) -> str:
        """The text, as long as before, with the first character of each look-alike replaced, and halves of
        surrogate pairs, which no tokenizer takes, by U+FFFD."""
        text = _LONE_SURROGATE.sub("\ufffd", text)
        while self._control.search(text):
            text = self._control.sub(lambda match: self._shielded(match[0][0]) + match[0][1:], text)
        return text

    def _shielded(self, character: str) -> str:
        if character not in self._shield_of:
            if len(self._shield_of) == len(self._shields):
                raise InputError("the tokenizer's control tokens begin with too many different characters")
            self._shield_of[character] = self._shields[len(self._shield_of)]
        return self._shield_of[character]

    def unshield(self, text: str) -> str:
        if not self._shield_of:
            return text
        return text.translate({ord(shield): character for character, shield in self._shield_of.items()})

    def wrap(self, text: str, ordinal: int) -> str:
        high, low = divmod(ordinal, _ORDINAL_DIGITS)
        return f"{self._open}{chr(_ORDINAL_BASE + high)}{chr(_ORDINAL_BASE + low)}{text}{self._close}"

    def read(self, marked: str) -> tuple[str, list[Item]]:
        """The rendering without its marks, and where the wrapped fields stand in it, in order.

        A template that cut a mark off gives fields that do not pair up; they are left out.
        """
        pieces: list[str] = []
        items: list[Item] = []
        opened: tuple[int, int] | None = None
        position = length = 0
        for match in self._mark.finditer(marked):
            piece = marked[position : match.start()]
            pieces.append(piece)
            length += len(piece)
            position = match.end()
            if match[0] == self._open:
                high, low = (ord(digit) - _ORDINAL_BASE for digit in marked[position : position + 2])
                opened = high * _ORDINAL_DIGITS + low, length
                position += 2
            elif opened is not None:
                items.append(Item(opened[0], opened[1], length))
                opened = None
        pieces.append(marked[position:])
        return "".join(pieces), items
