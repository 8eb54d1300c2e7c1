"""Copies, forks and near-copies are supervised once, and every turn is accounted for."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from instep.config import BuildSettings
from instep.records import Conversation
from instep.sessions import ReadReport, build

LONG = (
    "The function walks the tree, collects every leaf, sorts them by name and writes one line for each. " * 6
)


def _session(
    id: str, turns: list[tuple[str, str]], started: str = "2026-01-01T00:00:00Z"
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [{"type": "session", "id": id, "timestamp": started, "cwd": "/w"}]
    for asked, said in turns:
        reply = {"role": "assistant", "content": [{"type": "text", "text": said}], "stopReason": "stop"}
        rows.append({"type": "message", "timestamp": started, "message": {"role": "user", "content": asked}})
        rows.append({"type": "message", "timestamp": started, "message": reply})
    return rows


def _build(folder: Path, *sessions: list[dict[str, Any]]) -> tuple[dict[str, Conversation], ReadReport]:
    for number, rows in enumerate(sessions):
        (folder / f"{number}.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")
    conversations, report = build([folder], BuildSettings())
    turns = sum(len(rows) // 2 for rows in sessions)
    assert report.supervised_turns + sum(report.not_supervised.values()) == turns
    return {conversation.id: conversation for conversation in conversations}, report


def _supervised(conversation: Conversation) -> list[str]:
    return [message.content for message in conversation.messages if message.supervised]


def test_a_copy_is_dropped(tmp_path: Path) -> None:
    turns = [(f"Question {i}", f"Answer {i}") for i in range(4)]
    found, report = _build(tmp_path, _session("a", turns), _session("b", turns, "2026-02-01T00:00:00Z"))
    assert list(found) == ["a"]
    assert report.dropped_conversations == Counter({"all turns repeat other sessions": 1})
    assert report.not_supervised == Counter({"repeated history": 4})


def test_a_copy_with_the_same_id_does_not_hide(tmp_path: Path) -> None:
    found, report = _build(tmp_path, _session("a", [("Q", "A")]), _session("a", [("Q", "A"), ("Q2", "A2")]))
    assert [_supervised(conversation) for conversation in found.values()] == [["A", "A2"]]
    assert report.supervised_turns == 2


def test_different_sessions_with_one_id_get_ids_of_their_own(tmp_path: Path) -> None:
    found, _ = _build(tmp_path, _session("a", [("Q", "A")]), _session("a", [("R", "B")]))
    assert list(found) == ["a", "a#2"]


def test_a_fork_keeps_its_new_turns(tmp_path: Path) -> None:
    shared = [(f"Question {i}", f"Answer {i}") for i in range(10)]
    longer = [*shared, *((f"More {i}", f"More said {i}") for i in range(3))]
    fork = [*shared, ("Other", "Other answer")]
    found, report = _build(tmp_path, _session("fork", fork), _session("longer", longer))
    assert len(_supervised(found["longer"])) == 13
    assert _supervised(found["fork"]) == ["Other answer"]
    assert len(found["fork"].messages) == 22  # the history is still its context
    assert report.not_supervised == Counter({"repeated history": 10})
    assert found["fork"].notes == ("10 turns not supervised: repeated history",)


def test_a_session_resumed_without_its_beginning(tmp_path: Path) -> None:
    turns = [(f"Question {i}", f"Answer {i}") for i in range(6)]
    found, report = _build(tmp_path, _session("a", turns), _session("b", [*turns[3:], ("New", "New answer")]))
    # The first turn of b has too little in common before it to be called the same; the next ones have enough.
    assert _supervised(found["b"]) == ["Answer 3", "New answer"]
    assert report.not_supervised == Counter({"repeated turn": 2})


def test_a_long_turn_is_supervised_once_wherever_it_stands(tmp_path: Path) -> None:
    found, report = _build(
        tmp_path, _session("a", [("One", LONG), ("x", "y")]), _session("b", [("Two", LONG), ("z", "w")])
    )
    assert _supervised(found["a"]) == [LONG, "y"]
    assert _supervised(found["b"]) == ["w"]
    assert report.not_supervised == Counter({"repeated turn": 1})


def test_short_answers_may_come_again(tmp_path: Path) -> None:
    found, _ = _build(tmp_path, _session("a", [("One?", "Yes.")]), _session("b", [("Two?", "Yes.")]))
    assert len(found) == 2


def test_repetition_inside_a_session_is_its_own(tmp_path: Path) -> None:
    found, _ = _build(tmp_path, _session("a", [("Again?", LONG)] * 4))
    assert len(_supervised(found["a"])) == 4


def _words(seed: int) -> str:
    return " ".join(f"w{(seed * 7919 + i * i) % 5003}" for i in range(90))


def test_a_near_duplicate_is_dropped_and_named(tmp_path: Path) -> None:
    turns = [(f"Question {i}", _words(i)) for i in range(5)]
    # Every turn differs in a word, every question too: only the runs of words give it away.
    near = [(f"Please: question {i}", _words(i).replace("w", "W", 1) + " done") for i in range(5)]
    found, report = _build(tmp_path, _session("a", turns), _session("b", near, "2026-02-01T00:00:00Z"))
    assert list(found) == ["a"]
    assert report.not_supervised == Counter({"near-duplicate session": 5})
    assert report.dropped_conversations == Counter({"near-duplicate session": 1})


def test_other_words_are_no_near_duplicate(tmp_path: Path) -> None:
    found, _ = _build(
        tmp_path,
        _session("a", [(f"Q{i}", _words(i)) for i in range(5)]),
        _session("b", [(f"Q{i}", _words(i + 100)) for i in range(5)]),
    )
    assert len(found) == 2


def test_order_of_files_does_not_matter_for_what_is_kept(tmp_path: Path) -> None:
    long = _session("long", [(f"Q{i}", f"A{i}") for i in range(5)])
    short = _session("short", [(f"Q{i}", f"A{i}") for i in range(3)])
    for name, order in (("x", (long, short)), ("y", (short, long))):
        folder = tmp_path / name
        folder.mkdir()
        found, _ = _build(folder, *order)
        assert list(found) == ["long"]
