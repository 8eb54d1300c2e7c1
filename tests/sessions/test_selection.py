"""What the options of `instep data build` keep and leave out."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest

from instep import sessions
from instep.errors import InputError
from instep.records import Conversation, Message, ToolCall
from instep.sessions.report import ReadReport
from instep.sessions.selection import clip, clip_text, parse_date
from instep.sessions.store import read_conversations, write_conversations


def test_since_and_project(fixtures: Path, read) -> None:
    conversations, report = read(fixtures, since="2026-03-01", project="anna/PROJECTS/")
    assert {c.source["format"] for c in conversations} == {"pi", "claude-code", "codex"}
    assert report.dropped_conversations["other project"] == 5
    conversations, report = read(fixtures, project="/Users/anna/projects/shop")  # the path before redaction
    assert [c.id for c in conversations] == ["pi-one"]
    with pytest.raises(InputError, match=r"nothing left to train on.*started before --since"):
        read("pi_v1.jsonl", since="2026-03-02")


def test_since_uses_the_files_time_where_a_session_has_none(fixtures: Path, tmp_path: Path, read) -> None:
    file = tmp_path / "chat.jsonl"
    file.write_bytes((fixtures / "chat.jsonl").read_bytes())
    os.utime(file, (1_700_000_000, 1_700_000_000))  # 2023-11-14
    assert len(read(file, since="2023-11-01")[0]) == 3
    with pytest.raises(InputError):
        read(file, since="2023-12-01")


def test_a_bad_date_is_refused_before_anything_is_read(tmp_path: Path, read) -> None:
    with pytest.raises(InputError, match="'yesterday' is no date"):
        read(tmp_path, since="yesterday")
    assert parse_date("2026-01-31T12:00:00Z").hour == 12


def test_exclude_tool(read, outline) -> None:
    (conversation,), report = read("pi_v1.jsonl", exclude_tools=("read",))
    assert outline(conversation)[1:4] == [
        "assistant: I will look. +bash",  # not what the model said any more: context
        "tool: a.py\u2028b.py",
        "assistant*: There are two files.",
    ]
    assert report.not_supervised["tool excluded"] == 1
    assert report.removed_messages == Counter({"result of an excluded tool": 1})
    assert [tool["function"]["name"] for tool in conversation.tools] == ["bash"]


def test_an_emptied_turn_is_removed(read, outline) -> None:
    (weather, *_), report = read("chat.jsonl", exclude_tools=("weather",))
    assert outline(weather) == ["system: Be kind.", "user: Weather in Bern?", "assistant*: Sunny."]
    assert weather.tools == ()
    assert report.not_supervised["tool excluded"] == 1


def test_an_excluded_tool_that_nobody_calls_is_said(read) -> None:
    _, report = read("pi_v1.jsonl", exclude_tools=("bsh",))
    assert report.notes == ["--exclude-tool bsh: no session calls a tool of that name"]


def test_clip_keeps_head_and_tail_and_says_how_much_went() -> None:
    assert clip_text("x" * 10, 10) == "x" * 10
    assert clip_text("abcdefghij", 5) == "abc\n[… 5 characters cut …]\nij"
    assert clip_text("a" + "x" * 12_345 + "z", 2) == "a\n[… 12,345 characters cut …]\nz"
    assert clip_text("abc", 1) == "a\n[… 2 characters cut …]\n"


def test_a_clipped_assistant_turn_is_not_supervised() -> None:
    call = ToolCall("write", {"path": "a", "parts": [{"text": "y" * 50}]})
    conversation = Conversation(
        "c",
        (
            Message("user", "u" * 50),
            Message("assistant", "short", supervised=True),
            Message("assistant", "long" * 20, supervised=True),
            Message("assistant", "call", tool_calls=(call,), supervised=True),
        ),
    )
    report = ReadReport()
    clipped = clip(conversation, 20, report)
    assert [message.supervised for message in clipped.messages] == [False, True, False, False]
    assert "30 characters cut" in clipped.messages[0].content
    assert "30 characters cut" in clipped.messages[3].tool_calls[0].arguments["parts"][0]["text"]
    assert report.not_supervised == Counter({"clipped": 2})


def test_no_redact_is_explicit(read) -> None:
    (conversation,), report = read("pi_v1.jsonl", redact=False)
    assert conversation.source["project"] == "/Users/anna/projects/shop"
    assert not report.redactions


def test_a_loop_of_links_in_a_folder_does_not_stop_the_others(tmp_path: Path, fixtures: Path, read) -> None:
    (tmp_path / "loop.jsonl").symlink_to("loop.jsonl")
    (tmp_path / "chat.jsonl").write_bytes((fixtures / "chat.jsonl").read_bytes())
    assert len(read(tmp_path)[0]) == 3


def _calls(arguments: str, tools: str = "[]") -> str:
    call = {"function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": [call]}]
    return json.dumps({"messages": messages, "tools": tools}) + "\n"


DEEP = '{"a":' * 700 + "1" + "}" * 700


@pytest.mark.parametrize(
    "line",
    [
        _calls(DEEP),
        _calls("{}", f'[{{"name": "f", "parameters": {DEEP}}}]'),
        _calls('{"x": "\\ud800"}'),
        _calls("{}", '[{"name": "f\\ud800"}]'),
    ],
    ids=["deep arguments", "deep schema", "half a character in arguments", "half a character in a schema"],
)
def test_json_text_inside_a_record_is_no_reason_to_stop(
    line: str, tmp_path: Path, fixtures: Path, read
) -> None:
    good = (fixtures / "chat.jsonl").read_text(encoding="utf-8")
    (tmp_path / "chat.jsonl").write_text(line + good, encoding="utf-8")
    conversations, _ = read(tmp_path / "chat.jsonl")
    assert len(conversations) >= 3
    write_conversations(tmp_path / "out.jsonl", conversations)
    assert len(read_conversations(tmp_path / "out.jsonl")) == len(conversations)


@pytest.mark.parametrize("weight", ["0", 0.5, [1], -1])
def test_a_weight_that_is_neither_0_nor_1_trains_nothing_and_is_counted(
    tmp_path: Path, weight: object
) -> None:
    turn = {"role": "assistant", "content": "Four.", "weight": weight}
    row = {"messages": [{"role": "user", "content": "2 + 2?"}, turn]}
    file = tmp_path / "rows.jsonl"
    good = {"messages": [row["messages"][0], {"role": "assistant", "content": "Five.", "weight": 1.0}]}
    file.write_text(json.dumps(row) + "\n" + json.dumps(good) + "\n")
    conversations, report = sessions.load(file)
    supervised = [m.content for c in conversations for m in c.messages if m.supervised]
    assert supervised == ["Five."]
    assert report.not_supervised["weight is neither 0 nor 1"] == 1
