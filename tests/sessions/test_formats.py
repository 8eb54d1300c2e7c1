"""What each reader makes of a session of its format, down to what is supervised and why the rest is not."""

from __future__ import annotations

import contextlib
import copy
import json
import random
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from instep.config import BuildSettings
from instep.errors import InputError
from instep.records import StopReason
from instep.sessions import build
from instep.sessions.formats import default_locations, detect
from instep.sessions.lines import split_records
from instep.sessions.store import read_conversations, write_conversations

FILES = ["pi_v1", "pi_v3_tree", "claude_code", "codex", "chat", "prompt_completion"]
NAMES = ["pi", "pi", "claude-code", "codex", "chat", "prompt-completion"]
FIXTURES = Path(__file__).parent / "fixtures"


@pytest.mark.parametrize(("file", "name"), zip(FILES, NAMES, strict=True))
def test_format_is_found_by_content(file: str, name: str, fixtures: Path) -> None:
    assert detect(split_records((fixtures / f"{file}.jsonl").read_bytes()).records) == name


def test_pi_linear(read, outline, assert_account) -> None:
    (conversation,), report = read("pi_v1.jsonl")
    assert outline(conversation) == [
        "user: List the files.",
        "assistant*: I will look. +bash +read",
        "tool: a.py\u2028b.py",
        "tool: # Shop",
        "assistant*: There are two files.",
        "user: Delete them.\n\n[image]",
        "assistant: I am about to",  # aborted: context, and its unanswered call is gone
        "assistant: overloaded",
        "user: Never mind.",
        "assistant*:  +bash",
    ]
    assert report.not_supervised == Counter({"aborted": 2, "ended in an error": 1})
    assert conversation.messages[1].stop is StopReason.TOOL_CALL
    assert conversation.messages[2].tool_call_id == "c1"
    assert conversation.messages[2].name == "bash"
    assert not conversation.messages[1].reasoning
    assert conversation.source["format"] == "pi"
    assert conversation.source["session"] == conversation.id == "pi-one"
    assert conversation.source["model"] == "m-large"
    assert_account([conversation], report, 6)


def test_reasoning_only_when_asked_for(read) -> None:
    (conversation,), _ = read("pi_v1.jsonl", include_reasoning=True)
    assert conversation.messages[1].reasoning == "The user wants ls."


def test_pi_tree_follows_the_newest_leaf_and_splits_at_compaction(read, outline, assert_account) -> None:
    conversations, report = read("pi_v3_tree.jsonl")
    before, after = map(outline, conversations)
    assert before[:2] == ["user: Start.", "assistant*: Started on the main branch."]
    assert "The wrong way failed." in before[2]
    assert before[3] == "user: Ran `git status`\n```\nclean\n```"
    assert before[4:] == [
        "user: Go on.",
        "assistant*: Before compaction.",
        "user: Kept question.",
        "assistant*: Kept answer.",
    ]
    assert "They began and went on." in after[0]
    assert after[1:] == [
        "user: Kept question.",
        "assistant: Kept answer.",  # supervised once, in the first part
        "user: Be brief.",
        "user: And now?",
        "assistant*: After compaction.",
    ]
    assert [conversation.id for conversation in conversations] == ["pi-tree", "pi-tree/2"]
    assert report.ignored["bashExecution with !!"] == 1
    assert "never shown" not in str(conversations)
    assert report.not_supervised == Counter({"abandoned branch": 1})
    assert_account(conversations, report, 5)


def test_pi_bridges_a_link_whose_line_was_lost(tmp_path: Path, fixtures: Path, read, outline) -> None:
    lines = (fixtures / "pi_v3_tree.jsonl").read_text("utf-8").split("\n")
    lines[8] = lines[8][:40]  # e8, the parent of e9
    file = tmp_path / "torn.jsonl"
    file.write_text("\n".join(lines), "utf-8")
    conversations, report = read(file)
    assert report.quarantined == Counter({"invalid JSON": 1})
    assert "assistant*: Started on the main branch." in outline(conversations[0])
    assert "assistant*: Before compaction." in outline(conversations[0])
    assert "1 broken links to a parent entry bridged" in conversations[0].notes


def test_a_damaged_file_loses_only_what_is_damaged(tmp_path: Path, fixtures: Path, read, outline) -> None:
    lines = (fixtures / "pi_v1.jsonl").read_bytes().split(b"\n")[:-1]
    damaged = b"\n".join(
        [
            lines[0] + lines[1],  # glued
            b"\0" * 4096 + lines[2],
            *lines[3:5],
            b'{"type": "hologram", "data": 1}',
            b"\xff\xfe",
            b"[]",
            *lines[5:12],
            lines[12][:60],  # torn
        ]
    )
    (tmp_path / "x.log").write_bytes(damaged)
    (conversation,), report = read(tmp_path / "x.log")
    (whole,), _ = read("pi_v1.jsonl")
    assert conversation.messages == whole.messages[:-1]
    assert report.quarantined == Counter(
        {"unknown record type 'hologram'": 1, "invalid UTF-8": 1, "not a JSON object": 1, "torn last line": 1}
    )
    assert report.repaired == Counter({"objects glued on one line": 1, "run of NUL removed": 1})


def test_a_result_whose_call_is_lost_is_removed_and_counted(tmp_path: Path, fixtures: Path, read) -> None:
    lines = (fixtures / "pi_v1.jsonl").read_text("utf-8").split("\n")
    (tmp_path / "x.jsonl").write_text("\n".join(lines[:2] + lines[3:]), "utf-8")
    (conversation,), report = read(tmp_path / "x.jsonl")
    assert report.removed_messages == Counter({"tool result without its call": 2})
    assert not [message for message in conversation.messages if message.role == "tool"]


def _claude(uuid: str, parent: str | None, kind: str, text: str, **more: Any) -> dict[str, Any]:
    message = {"role": kind, "content": text}
    return {"type": kind, "uuid": uuid, "parentUuid": parent, "sessionId": "s", "message": message, **more}


def test_claude_code_compaction_without_a_new_root(tmp_path: Path, read, outline) -> None:
    rows = [
        _claude("1", None, "user", "Begin."),
        _claude("2", "1", "assistant", "Begun."),
        _claude("3", "2", "user", "Summary of it all.", isCompactSummary=True),
        _claude("4", "3", "assistant", "Going on."),
    ]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")
    conversations, _ = read(tmp_path / "x.jsonl")
    assert list(map(outline, conversations)) == [
        ["user: Begin.", "assistant*: Begun."],
        ["user: Summary of it all.", "assistant*: Going on."],
    ]


def test_claude_code_bridges_a_lost_record(tmp_path: Path, read, outline) -> None:
    rows = [
        _claude("1", "in another file", "user", "Begin."),
        _claude("2", "1", "assistant", "Begun."),
        _claude("4", "3", "assistant", "Going on."),
    ]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")
    (conversation,), _ = read(tmp_path / "x.jsonl")
    assert outline(conversation) == ["user: Begin.", "assistant*: Begun.", "assistant*: Going on."]


def test_claude_code(read, outline, assert_account) -> None:
    conversations, report = read("claude_code.jsonl")
    main, compacted, side = conversations
    assert outline(main) == [
        "user: Fix the bug.",
        "assistant*: I will read both files. +Read +Read",  # four records, one reply
        "tool: content of a",  # beside the path of the tree: parallel results fork it
        "tool: content of b",
        "assistant*: Fixed. +Task",
        "tool: The fix is right.",
        "user: Again.",
        "assistant: I was stopped in the",
        "user: [Request interrupted by user]",
        "user: <skill>Write plainly.</skill>",
        "assistant*: Done before compaction.",
    ]
    assert [m.tool_call_id for m in main.messages if m.role == "tool"] == ["t1", "t2", "t3"]
    assert outline(compacted) == [
        "user: This session is being continued: the bug is fixed.",
        "user: Write a test.",
        "assistant*: Done after compaction.",
    ]
    assert outline(side) == ["user: Check the fix.", "assistant*: The fix is right."]
    assert side.id == "cc-1/sidechain-ag1"
    assert report.not_supervised == Counter({"abandoned branch": 1, "ended in an error": 1, "aborted": 1})
    assert report.ignored["summary"] == 1
    assert_account(conversations, report, 8)


def test_codex(read, outline, assert_account) -> None:
    conversations, report = read("codex.jsonl")
    first, second = map(outline, conversations)
    assert first[0].startswith("system: You are Codex.\n\nObey the sandbox.\n\n<environment_context>")
    assert first[1:] == [
        "user: Run the tests.",
        "assistant*: Running the tests. +shell +apply_patch",
        "tool: 2 passed",
        "tool: ok",
        "assistant*: All tests pass.",
        "user: Stop me.",
        "assistant: I was stopped",
    ]
    assert conversations[0].messages[2].tool_calls[0].arguments == {"command": ["pytest", "-q"]}
    assert conversations[0].messages[2].tool_calls[1].arguments == {"input": "*** Begin Patch"}
    assert "Tests pass." in second[3]
    assert second[-3:] == ["assistant*:  +local_shell", "tool: a", "assistant*: You are welcome."]
    assert report.not_supervised == Counter({"abandoned branch": 1, "aborted": 1})
    assert_account(conversations, report, 6)


def test_codex_replacement_history_is_context(tmp_path: Path, fixtures: Path, read, outline) -> None:
    kept = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Run the tests."}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "All tests pass."}],
        },
    ]
    rows = [json.loads(line) for line in (fixtures / "codex.jsonl").read_text("utf-8").split("\n") if line]
    for row in rows:
        if row["type"] == "compacted":
            row["payload"]["replacement_history"] = kept
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")
    conversations, _ = read(tmp_path / "x.jsonl")
    assert outline(conversations[1])[1:4] == [
        "user: Run the tests.",
        "assistant: All tests pass.",
        "user: Thanks.",
    ]


def test_codex_without_payloads(tmp_path: Path, read, outline) -> None:
    rows = [
        {"id": "old", "timestamp": "2025-06-01T00:00:00Z", "instructions": None},
        {"record_type": "state"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hello"}]},
    ]
    file = tmp_path / "rollout.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    (conversation,), report = read(file)
    assert report.formats == Counter({"codex": 1})
    assert outline(conversation) == ["user: Hi", "assistant*: Hello"]


def test_chat_rows(read, outline, assert_account) -> None:
    (weather, weighted, bad), report = read("chat.jsonl")
    assert outline(weather) == [
        "system: Be kind.",
        "user: Weather in Bern?",
        "assistant*:  +weather",
        "tool: sunny",
        "assistant*: Sunny.",
    ]
    assert weather.messages[2].tool_calls[0].arguments == {"city": "Bern", "days": 2}
    assert weather.messages[3].name == "weather"
    assert weather.tools[0]["function"]["description"] == "Forecast"  # its own schema is kept as it is
    assert not weather.notes
    assert outline(weighted)[1::2] == ["assistant: Context only.", "assistant*: Trained."]
    assert bad.messages[1].tool_calls[0].arguments == {"input": "{not json"}
    assert not bad.messages[1].supervised
    assert report.quarantined == Counter({"row with a message of unknown role": 1})
    assert_account([weather, weighted, bad], report, 6)


def test_prompt_completion_supervises_the_completion_only(read, outline) -> None:
    (strings, lists), _ = read("prompt_completion.jsonl")
    assert outline(strings) == ["user: Two plus two?", "assistant*:  Four."]
    assert outline(lists)[1] == "assistant: Hello"
    assert outline(lists)[3] == "assistant*: Six."


def test_inferred_schemas(read) -> None:
    (conversation,), _ = read("pi_v1.jsonl")
    bash, read_tool = (tool["function"] for tool in conversation.tools)
    assert bash["parameters"] == {
        "type": "object",
        "properties": {"command": {"type": "string"}, "timeout": {"type": "integer"}},
        "required": ["command"],  # the third call has a timeout, the others do not
    }
    assert read_tool["parameters"]["required"] == ["path", "limit"]
    assert conversation.notes == ("tool schemas inferred from calls: bash, read",)


def test_default_locations_follow_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CODEX_HOME", "CLAUDE_CONFIG_DIR", "PI_CODING_AGENT_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(InputError, match="no codex sessions found"):
        default_locations("codex")
    places = [".pi/agent/sessions", ".claude/projects", ".codex/sessions", ".codex/archived_sessions"]
    for place in places:
        (tmp_path / place).mkdir(parents=True)
    found = [place for agent in ("pi", "claude-code", "codex") for place in default_locations(agent)]
    assert found == [tmp_path / place for place in places]
    with pytest.raises(InputError, match=r"unknown agent 'cursor': known are pi, claude-code, codex"):
        default_locations("cursor")


def test_real_pi_session(shared_sessions: Path, read, assert_account) -> None:
    (conversation,), report = read(shared_sessions / "pi/large-session.jsonl")
    assert report.records == 1019
    assert report.supervised_turns == 431
    assert report.not_supervised == Counter({"aborted": 21, "ended in an error": 1})
    assert not report.quarantined
    assert [tool["function"]["name"] for tool in conversation.tools] == ["read", "bash", "edit", "write"]
    assert_account([conversation], report, 453)


def test_real_claude_code_session(shared_sessions: Path, read) -> None:
    (conversation,), report = read(shared_sessions / "claude-code/representative.jsonl")
    assert report.messages == Counter({"assistant": 5, "user": 4, "tool": 2})
    assert report.supervised_turns == 5
    assert conversation.messages[4].name == "Edit"


junk = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.text(max_size=5),
    st.just([]),
    st.just({}),
    st.just([{"type": {}}]),
)


@given(st.sampled_from(FILES), st.integers(0, 2**32), st.lists(junk, min_size=1, max_size=6))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_value_anywhere_stops_the_build(file: str, seed: int, values: list[Any]) -> None:
    """Replace fields at random places: what is bad may be quarantined or refused in one line, nothing may fail."""
    rng = random.Random(seed)
    rows = [json.loads(line) for line in (FIXTURES / f"{file}.jsonl").read_text("utf-8").split("\n") if line]
    for value in values:
        node: Any = rng.choice(rows)
        while True:
            key = rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
            if isinstance(node[key], (dict, list)) and node[key] and rng.random() < 0.8:
                node = node[key]
                continue
            node[key] = copy.deepcopy(value)
            break
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "session.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)), "utf-8")
        with contextlib.suppress(InputError):
            conversations, _ = build([path], BuildSettings(include_reasoning=True))
            write_conversations(Path(folder) / "out.jsonl", conversations)
            assert read_conversations(Path(folder) / "out.jsonl") == conversations


def test_nothing_usable_names_what_was_found(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_bytes(b"")
    (tmp_path / "weights.bin").write_bytes(bytes(range(256)) * 300)
    (tmp_path / "notes.txt").write_text("hello\nworld\n")
    (tmp_path / "other.jsonl").write_text('{"x": 1}\n')
    with pytest.raises(InputError) as caught:
        build([tmp_path])
    for reason in ("1 empty", "1 binary", "1 not JSONL", "1 JSON lines of no known format"):
        assert reason in str(caught.value)
    with pytest.raises(InputError, match="does not exist"):
        build([tmp_path / "nowhere"])
