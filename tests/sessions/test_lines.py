"""The line splitter: whatever the bytes, it does not raise, and whole records are never lost."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instep.sessions.lines import MAX_DEPTH, split_records

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(st.text(), values, max_size=4)
noise = st.sampled_from(
    [b"", b"  ", b"\0" * 7, b"\r", b'{"type":"message","message":{"ro', b"[1, 2]", b"\xff\xfe", b"null"]
)


def _utf8(value: object) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


@given(st.binary(max_size=400))
def test_arbitrary_bytes_never_raise(data: bytes) -> None:
    split_records(data)


@given(st.lists(st.tuples(objects.filter(_utf8), st.booleans(), noise)), st.booleans())
def test_records_survive_noise_between_the_lines(
    rows: list[tuple[dict, bool, bytes]], nul_before: bool
) -> None:
    data = b""
    for value, ascii, junk in rows:
        line = json.dumps(value, ensure_ascii=ascii).encode()
        data += junk + b"\n" + (b"\0\0\0" if nul_before else b"") + line + b"\n"
    lines = split_records(data)
    assert [record.value for record in lines.records] == [value for value, _, _ in rows]


@given(st.lists(objects.filter(_utf8), min_size=2, max_size=4))
def test_objects_glued_on_one_line_are_taken_apart(rows: list[dict]) -> None:
    lines = split_records("".join(json.dumps(row) for row in rows).encode())
    assert [record.value for record in lines.records] == rows
    assert lines.repaired == Counter({"objects glued on one line": 1})


def test_lines_end_at_newline_only() -> None:
    lines = split_records('{"a": "one\u2028two\u2029three\u0085four"}\n{"b": 1}\n'.encode())
    assert [(record.line, record.value) for record in lines.records] == [
        (1, {"a": "one\u2028two\u2029three\u0085four"}),
        (2, {"b": 1}),
    ]


def test_a_torn_last_line_is_quarantined_and_named() -> None:
    lines = split_records(b'{"a": 1}\n{"type": "mess')
    assert len(lines.records) == 1
    assert lines.quarantined == Counter({"torn last line": 1})


def test_a_whole_record_behind_a_torn_one_is_found() -> None:
    lines = split_records(b'{"type":"message","message":{"role":"us{"type":"message","id":"x"}\n')
    assert [record.value for record in lines.records] == [{"type": "message", "id": "x"}]
    assert lines.quarantined == Counter({"invalid JSON": 1})


def test_a_fragment_inside_a_torn_record_is_no_record() -> None:
    lines = split_records(b'{"type":"message","message":{"type":"text","text":"x"},"parentId":"tor\n')
    assert not lines.records
    assert lines.quarantined == Counter({"invalid JSON": 1})


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"a": NaN}', "invalid JSON"),
        (b'{"a": -Infinity}', "invalid JSON"),
        (b'{"a": 1e999}', "invalid JSON"),
        (b"[1]", "not a JSON object"),
        (b'"text"', "not a JSON object"),
        (b'{"a": "\xff"}', "invalid UTF-8"),
        (b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}", "nested too deeply"),
        (b'{"a":' + b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1) + b"}", "nested too deeply"),
    ],
)
def test_reasons(line: bytes, reason: str) -> None:
    lines = split_records(line + b"\n")
    assert not lines.records
    assert lines.quarantined == Counter({reason: 1})


def test_a_lone_surrogate_is_replaced_so_that_the_text_can_be_written() -> None:
    lines = split_records(rb'{"a": "x\ud83dy", "b": "\ud83d\ude00"}' + b"\n")
    assert lines.records[0].value == {"a": "x\ufffdy", "b": "\U0001f600"}
    assert lines.repaired == Counter({"lone surrogate replaced": 1})


def test_a_byte_order_mark_is_no_text() -> None:
    assert split_records(b'\xef\xbb\xbf{"a": 1}\r\n').records[0].value == {"a": 1}
