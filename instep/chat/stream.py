"""Sampled ids → text as it can be shown: whole characters, and nothing that may yet become a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_UNDECODED = "\N{REPLACEMENT CHARACTER}"
_LONGEST_UNDECODED = 3
"""A character has at most four bytes: of one that is not complete yet, at most three are there."""


class Detokenizer:
    """Decodes id by id; the pieces together are the text of all ids decoded at once.

    A token may hold a part of a character, and a decoder may treat the first token of a text differently, so each
    piece is decoded behind the tokens before it, and bytes that are no character yet are held back.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._context, self._read = (
            0,
            0,
        )  # ids [context, read) are the surroundings in which [read, …) is decoded
        self._before = 0  # characters of the surroundings
        self._sent = 0  # characters of [read, …) that were given out

    def _decode(self, start: int, end: int | None = None) -> str:
        return self._tokenizer.decode(
            self._ids[start:end], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def push(self, token: int) -> str:
        """The text that is certain now and was not before."""
        self._ids.append(token)
        text = self._decode(self._context)
        certain = len(text)
        while text[:certain].endswith(_UNDECODED) and len(text) - certain < _LONGEST_UNDECODED:
            certain -= 1
        piece = text[self._before + self._sent : certain]
        self._sent += len(piece)
        if certain == len(text):
            self._context, self._read, self._sent = self._read, len(self._ids), 0
            self._before = len(self._decode(self._context))
        return piece

    def finish(self) -> str:
        """The rest: bytes that never became a character, each as U+FFFD."""
        piece = self._decode(self._context)[self._before + self._sent :]
        self._sent += len(piece)
        return piece


class TextStream:
    """The text of one answer: push every sampled id, call `finish` at the end.

    What `push` and `finish` return, joined, is `text`: all up to the first stop string, which is not part of it,
    nor is a stop token. `stopped` tells that a stop string has been met.
    """

    def __init__(
        self, tokenizer: Any, stop_strings: Sequence[str] = (), stop_tokens: Sequence[int] = ()
    ) -> None:
        self._decoder = Detokenizer(tokenizer)
        self._stop_strings = tuple(stop for stop in stop_strings if stop)
        self._stop_tokens = frozenset(stop_tokens)
        self._held = ""
        self._given: list[str] = []
        self.stopped = False

    @property
    def text(self) -> str:
        return "".join(self._given)

    def push(self, token: int) -> str:
        """The text that can be shown now and could not before."""
        if self.stopped or token in self._stop_tokens:
            return ""
        return self._release(self._decoder.push(token))

    def finish(self) -> str:
        """What was held back and, as it turns out, is no stop string."""
        if self.stopped:
            return ""
        piece = self._release(self._decoder.finish())
        if not self.stopped and self._held:
            self._given.append(self._held)
            piece, self._held = piece + self._held, ""
        return piece

    def _release(self, new: str) -> str:
        text = self._held + new
        found = [place for stop in self._stop_strings if (place := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            piece = text[: min(found)]
        else:
            keep = max((_overlap(text, stop) for stop in self._stop_strings), default=0)
            piece, self._held = text[: len(text) - keep], text[len(text) - keep :]
        self._given.append(piece)
        return piece


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, and not the whole of it."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
