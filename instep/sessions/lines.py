"""From the bytes of a JSONL file to JSON objects, whatever state the file is in.

Lines end at `\\n` and nowhere else: a U+2028 inside a string is text. What cannot be used is quarantined and
counted by reason; nothing here stops because of a bad line.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

MAX_DEPTH = 100
"""Deepest nesting of a record; what is deeper is no session record and would overrun recursive walks."""

_LONE_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
# How a record of a known format can start; where a torn record is glued to a whole one, reading goes on here.
_RECORD_START = re.compile(r'\{\s*"(?:type|timestamp|parentUuid|uuid|id|messages|prompt|isSidechain)"\s*:')
_RESYNC_ATTEMPTS = 20


@dataclass(frozen=True)
class Record:
    line: int
    """Line number in the file, from 1."""
    value: dict[str, Any]


@dataclass
class Lines:
    """The records of a file, in order; `quarantined` counts what was lost, `repaired` what was mended."""

    records: list[Record] = field(default_factory=list)
    quarantined: Counter[str] = field(default_factory=Counter)
    repaired: Counter[str] = field(default_factory=Counter)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is too large for a float")
    return number


def _refuse(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


STRICT = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)
"""JSON as its standard has it: no NaN, no Infinity, no number that overflows to one."""


def decode(text: str) -> Any:
    """A JSON value that stands as text inside a record. Raises ValueError where it is none, or nested too deeply."""
    try:
        value = STRICT.decode(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if _too_deep(text, value):
        raise ValueError("nested too deeply")
    return _without_lone_surrogates(value)[0] if _LONE_SURROGATE.search(text) else value


def split_records(data: bytes) -> Lines:
    """Read every JSON object in `data`; several on one line, NUL runs and torn lines included. Never raises."""
    lines = Lines()
    rows = data.split(b"\n")
    for number, raw in enumerate(rows, 1):
        cleaned = raw.replace(b"\0", b"")
        if len(cleaned) != len(raw):
            lines.repaired["run of NUL removed"] += 1
        try:
            text = cleaned.decode("utf-8-sig" if number == 1 else "utf-8").strip(" \t\r")
        except UnicodeDecodeError:
            lines.quarantined["invalid UTF-8"] += 1
            continue
        if text:
            _read_line(text, number, torn=number == len(rows), lines=lines)
    return lines


def _read_line(text: str, number: int, torn: bool, lines: Lines) -> None:
    objects = 0
    for value, reason in _values(text):
        if reason is None and not isinstance(value, dict):
            reason = "not a JSON object"
        elif reason is None and _too_deep(text, value):
            reason = "nested too deeply"
        if reason is not None:
            lines.quarantined["torn last line" if torn and reason == "invalid JSON" else reason] += 1
            continue
        if _LONE_SURROGATE.search(text):
            value, changed = _without_lone_surrogates(value)
            lines.repaired["lone surrogate replaced"] += changed
        lines.records.append(Record(number, value))
        objects += 1
    if objects > 1:
        lines.repaired["objects glued on one line"] += 1


def _values(text: str) -> Iterator[tuple[Any, str | None]]:
    """Yield (value, None) for each JSON value on the line and (None, reason) for what is none."""
    position = 0
    while position < len(text):
        try:
            value, position = STRICT.raw_decode(text, position)
        except RecursionError:
            yield None, "nested too deeply"
            return
        except ValueError:
            yield None, "invalid JSON"
            value, position = _resync(text, position + 1)
            if value is None:
                return
        yield value, None
        while position < len(text) and text[position] in " \t\r,":
            position += 1


def _resync(text: str, start: int) -> tuple[Any, int]:
    """A whole record behind a torn one on the same line: it must reach the line's end, or it is a fragment."""
    for attempt, match in enumerate(_RECORD_START.finditer(text, start)):
        if attempt == _RESYNC_ATTEMPTS:
            break
        try:
            value, end = STRICT.raw_decode(text, match.start())
        except (ValueError, RecursionError):
            continue
        if end == len(text):
            return value, end
    return None, len(text)


def _too_deep(text: str, value: Any) -> bool:
    if text.count("{") + text.count("[") <= MAX_DEPTH:
        return False
    layer, depth = [value], 0
    while layer:
        depth += 1
        if depth > MAX_DEPTH:
            return True
        layer = [
            child
            for node in layer
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, (dict, list))
        ]
    return False


def _without_lone_surrogates(value: Any) -> tuple[Any, int]:
    """JSON can escape half a surrogate pair, UTF-8 cannot hold it: put U+FFFD in its place."""
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace"), 1
        return value, 0
    if isinstance(value, list):
        pairs = [_without_lone_surrogates(item) for item in value]
        return [item for item, _ in pairs], sum(changed for _, changed in pairs)
    if isinstance(value, dict):
        items = [
            (_without_lone_surrogates(key), _without_lone_surrogates(item)) for key, item in value.items()
        ]
        return {key: item for (key, _), (item, _) in items}, sum(a + b for (_, a), (_, b) in items)
    return value, 0
