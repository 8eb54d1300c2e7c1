"""Tokenizers: loading one from a model folder, and encoding rendered text piece by piece.

A rendering is cut at the control tokens that the template itself wrote; what lies between is encoded as plain
text, so text in a message that looks like a control token never becomes one. Tokenizers split their input at
added tokens before anything else, so for ordinary text this equals encoding the whole at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from instep.errors import InputError
from instep.rendering.base_models import lend_template, lender

_ANCHOR = "\U0010fffc\U0010fffdanchor\U0010fffd\U0010fffc"


def load_tokenizer(folder: str | Path) -> Any:
    """Load the fast tokenizer of a model folder; a base model's gets its family's chat template.

    Raises InputError where the folder is missing, holds no tokenizer that can be read, or no chat template.
    """
    path = Path(folder)
    if not path.is_dir():
        raise InputError(f"{path}: no such folder; expected a model folder with tokenizer files")
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise InputError(f"{path}: no tokenizer here; expected tokenizer.json beside config.json")
    from transformers import AutoTokenizer  # slow to import

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # the library raises bare Exceptions for unreadable files
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"{path}: the tokenizer cannot be read ({reason}); fetch the model again") from error
    if not getattr(tokenizer, "is_fast", False):
        raise InputError(f"{path}: only fast tokenizers (tokenizer.json) can be used, this one is slow")
    lend_template(tokenizer)
    if not tokenizer.chat_template:
        raise InputError(
            f"{path}: the tokenizer has no chat template, so conversations cannot be rendered;"
            " use an instruction-tuned model, or put its chat_template.jinja into the folder"
        )
    return tokenizer


def write_lent_template(base: Path, target: Path) -> None:
    """Write the chat template that a base model was lent beside the files of a model made from it, so that who
    loads that model reads turns as it was trained on them. Nothing where the base has one of its own."""
    try:
        tokenizer = load_tokenizer(base)
    except InputError:
        return  # a model without a tokenizer, or without turns
    if lender(tokenizer):
        (target / "chat_template.jinja").write_text(tokenizer.chat_template, encoding="utf-8")


def added_tokens(tokenizer: Any) -> dict[str, Any]:
    """Text → AddedToken of every token that is matched before the text is split."""
    return {token.content: token for token in tokenizer.added_tokens_decoder.values()}


def special_tokens(tokenizer: Any) -> set[str]:
    return {text for text, token in added_tokens(tokenizer).items() if token.special}


def pattern_of(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern that matches any of the texts, longer ones first; it never matches where there are none."""
    ordered = sorted(texts, key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")


class PieceEncoder:
    """Encodes rendered text whose control tokens are known apart from look-alikes in its messages."""

    def __init__(self, tokenizer: Any, control: Iterable[str]) -> None:
        from tokenizers import AddedToken, Tokenizer

        tokens = added_tokens(tokenizer)
        self.control = frozenset(control)
        self.pattern = pattern_of(self.control)
        self._rstrip = {text for text in self.control if tokens[text].rstrip}
        self._lstrip = {text for text in self.control if tokens[text].lstrip}
        self._ids = {text: tokenizer.convert_tokens_to_ids(text) for text in self.control}
        state = tokenizer.backend_tokenizer.to_str()
        if any(not tokens[text].special for text in self.control):
            # Only tokens marked special can be switched off, so the copy marks every control token special.
            loaded = json.loads(state)
            for token in loaded["added_tokens"]:
                token["special"] = token["special"] or token["content"] in self.control
            state = json.dumps(loaded)
        plain = Tokenizer.from_str(state)
        plain.no_padding()
        plain.no_truncation()
        plain.encode_special_tokens = True
        # A piece from the middle must not get the leading space that some tokenizers add to the start of a text.
        plain.add_tokens([AddedToken(_ANCHOR, normalized=False, special=False)])
        self._plain = plain

    def encode(
        self, shielded: str, text: str, cuts: Sequence[int], cache: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return (token ids int32 [T], first character of each int64 [T]).

        `shielded` is `text` with every look-alike broken; both have one length. No token crosses a cut.
        """
        pieces = self._pieces(shielded, cuts)
        plain = [(start, text[start:end]) for start, end, name in pieces if name is None]
        encoded = self._encode_plain(
            [piece for start, piece in plain if start], {} if cache is None else cache
        )
        ids: list[np.ndarray] = []
        offsets: list[np.ndarray] = []
        for start, end, name in pieces:
            if name is not None:
                ids.append(np.array([self._ids[name]], np.int32))
                offsets.append(np.array([start]))
                continue
            piece = text[start:end]
            if start:
                piece_ids, piece_offsets = encoded[piece]
            else:
                encoding = self._plain.encode(piece, add_special_tokens=False)
                piece_ids = np.array(encoding.ids, np.int32)
                piece_offsets = _inside([offset for offset, _ in encoding.offsets], piece)
            ids.append(piece_ids)
            offsets.append(piece_offsets + start)
        if not ids:
            return np.zeros(0, np.int32), np.zeros(0, np.int64)
        return np.concatenate(ids).astype(np.int32), np.concatenate(offsets).astype(np.int64)

    def _pieces(self, shielded: str, cuts: Sequence[int]) -> list[tuple[int, int, str | None]]:
        """(start, end, control token or None), in order, covering the text but for stripped white space."""
        pieces: list[tuple[int, int, str | None]] = []
        fixed = set(cuts)
        borders = sorted(fixed)
        at = 0
        position = 0

        def plain_until(limit: int) -> None:
            nonlocal at, position
            while at < len(borders) and borders[at] <= position:
                at += 1
            while position < limit:
                end = limit
                if at < len(borders) and borders[at] < limit:
                    end = borders[at]
                    at += 1
                pieces.append((position, end, None))
                position = end

        for match in self.pattern.finditer(shielded):
            name = match[0]
            start, end = match.span()
            if name in self._lstrip:
                while start > position and shielded[start - 1].isspace() and start not in fixed:
                    start -= 1
            plain_until(start)
            pieces.append((match.start(), end, name))
            position = end
            if name in self._rstrip:
                while position < len(shielded) and shielded[position].isspace() and position not in fixed:
                    position += 1
        plain_until(len(shielded))
        return pieces

    def _encode_plain(self, pieces: Sequence[str], cache: dict[str, Any]) -> dict[str, Any]:
        new = list(dict.fromkeys(piece for piece in pieces if piece not in cache))
        encodings = self._plain.encode_batch([_ANCHOR + piece for piece in new], add_special_tokens=False)
        for piece, encoding in zip(new, encodings, strict=True):
            offsets = [offset - len(_ANCHOR) for offset, _ in encoding.offsets[1:]]
            cache[piece] = np.array(encoding.ids[1:], np.int32), _inside(offsets, piece)
        return cache


def _inside(offsets: Sequence[int], piece: str) -> np.ndarray:
    """Offsets kept inside their piece: tokenizers that trim white space put a blank token after its end."""
    return np.minimum(np.array(offsets, np.int64), len(piece) - 1)
