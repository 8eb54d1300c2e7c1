"""Conversations on disk: what is written is read again, and a faulty line is named."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instep.errors import InputError
from instep.records import Conversation, Message, StopReason, ToolCall
from instep.sessions import load
from instep.sessions.store import parse_conversations, read_conversations, to_json, write_conversations

text = st.text(st.characters(codec="utf-8"), max_size=20)
names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
arguments = st.dictionaries(
    text, st.none() | st.booleans() | st.integers() | text | st.lists(text), max_size=3
)
calls = st.lists(st.builds(ToolCall, names, arguments, st.none() | names), max_size=2).map(tuple)
assistant = st.builds(
    Message,
    st.just("assistant"),
    text,
    reasoning=text,
    tool_calls=calls,
    stop=st.sampled_from(StopReason),
    supervised=st.booleans(),
)
other = st.builds(Message, st.sampled_from(["system", "user", "tool"]), text, tool_call_id=st.none() | names)
conversation = st.builds(
    Conversation,
    names,
    st.lists(assistant | other, max_size=4).map(tuple),
    source=st.fixed_dictionaries({"format": names, "project": text}),
    notes=st.lists(text, max_size=2).map(tuple),
)


@given(st.lists(conversation, max_size=4, unique_by=lambda one: one.id))
def test_round_trip(conversations: list[Conversation]) -> None:
    data = "".join(json.dumps(to_json(one), ensure_ascii=False) + "\n" for one in conversations).encode()
    assert parse_conversations(data, Path("f")) == conversations


def test_form_on_disk(tmp_path: Path) -> None:
    call = ToolCall("run", {"n": 1, "text": "a\u2028b"}, "c1")
    messages = (Message("user", "Hi"), Message("assistant", tool_calls=(call,), supervised=True))
    write_conversations(tmp_path / "c.jsonl", [Conversation("x", messages)])
    assert json.loads((tmp_path / "c.jsonl").read_text("utf-8")) == {
        "id": "x",
        "source": {"format": "instep"},
        "messages": [
            {"role": "user", "content": "Hi"},
            {
                "role": "assistant",
                "tool_calls": [{"id": "c1", "name": "run", "arguments": {"n": 1, "text": "a\u2028b"}}],
                "supervised": True,
            },
        ],
    }
    assert [path.name for path in tmp_path.iterdir()] == ["c.jsonl"]


GOOD = '{"id": "a", "source": {"format": "pi"}, "messages": []}'


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{", "not one JSON object"),
        ("[]", "must be a JSON object, found list"),
        ('{"id": "b", "messages": [{"role": "user", "content": NaN}]}', "not one JSON object"),
        ('{"id": "", "messages": []}', "`id` must be a text"),
        ('{"id": "b"}', "`messages` must be a list"),
        ('{"id": "b", "messages": [], "extra": 1}', "unknown field 'extra'"),
        ('{"id": "b", "messages": [{"role": "bot"}]}', "message 0: role 'bot' is none of"),
        ('{"id": "b", "messages": [{"role": "user", "content": 3}]}', "`content` must be text"),
        ('{"id": "b", "messages": [{"role": "user", "supervised": true}]}', "only assistant messages"),
        ('{"id": "b", "messages": [{"role": "assistant", "stop": "tired"}]}', "stop 'tired' is none of"),
        (
            '{"id": "b", "messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{}"}]}]}',
            "tool call 0: `arguments` must be a JSON object, found str",
        ),
        ('{"id": "b", "messages": [], "tools": [{"name": "f"}]}', "`tools` must be a list of"),
        (GOOD, "id 'a' is already on line 1"),
    ],
)
def test_a_faulty_line_is_named(line: str, what: str, tmp_path: Path) -> None:
    file = tmp_path / "c.jsonl"
    file.write_text(f"{GOOD}\n\n{line}\n", "utf-8")
    with pytest.raises(InputError) as caught:
        load(file)
    assert str(caught.value).startswith(f"{file}:3: ")
    assert what in str(caught.value)
    assert "\n" not in str(caught.value)


def test_nan_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    bad = Conversation("x", (Message("assistant", tool_calls=(ToolCall("f", {"n": float("nan")}),)),))
    with pytest.raises(InputError, match="conversation x cannot be written"):
        write_conversations(tmp_path / "c.jsonl", [bad])
    assert not list(tmp_path.iterdir())


def test_load_knows_its_own_files_from_sessions(tmp_path: Path, fixtures: Path) -> None:
    built, _ = load(fixtures / "pi_v1.jsonl")
    write_conversations(tmp_path / "c.txt", built)
    again, report = load(tmp_path / "c.txt")
    assert again == built == read_conversations(tmp_path / "c.txt")
    assert report.formats == {"conversations": 1}
    assert report.supervised_turns == 3


def test_a_conversations_file_in_a_folder_of_sessions_is_not_read_again(
    tmp_path: Path, fixtures: Path
) -> None:
    (tmp_path / "pi.jsonl").write_bytes((fixtures / "pi_v1.jsonl").read_bytes())
    built, _ = load(tmp_path)
    write_conversations(tmp_path / "old.jsonl", built)
    again, report = load(tmp_path)
    assert len(again) == 1
    assert report.skipped_files == {"already a conversations file": 1}


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_text(GOOD)
    (tmp_path / "c.jsonl").chmod(0)
    with pytest.raises(InputError, match="unreadable"):
        load(tmp_path / "c.jsonl")
