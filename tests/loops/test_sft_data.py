"""The held-out split and the account, on conversations rendered by a real (tiny) tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from instep.config import SftSettings
from instep.errors import InputError
from instep.loops.sft_data import REFUSED, SftData, prepare
from instep.records import Conversation, Message
from instep.rendering.template import Renderer
from instep.sessions.store import write_conversations


def conversation(name: str, session: str, turns: int, first: int = 0) -> Conversation:
    messages: list[Message] = []
    for turn in range(first, first + turns):
        messages.append(Message("user", f"Question {turn} of {name}?"))
        messages.append(Message("assistant", f"Answer {turn} to {name}.", supervised=True))
    return Conversation(name, tuple(messages), source={"session": session})


@pytest.fixture
def make(tiny_model: Path, tmp_path: Path) -> Any:
    def run(conversations: Iterable[Conversation], **changes: Any) -> SftData:
        path = tmp_path / "data.jsonl"
        path.unlink(missing_ok=True)
        write_conversations(path, list(conversations))
        tree: dict[str, Any] = {
            "model": {"path": str(tiny_model)},
            "data": {"path": str(path), "validation_share": 0.25, **changes.pop("data", {})},
            "rendering": {"max_length": 160, "min_context": 20},
            **changes,
        }
        return prepare(SftSettings.model_validate(tree))

    return run


def supervised_text(samples: list[Any], tokenizer: Any) -> list[str]:
    return [tokenizer.decode(s.tokens[s.weight > 0].tolist()) for s in samples]


def test_sessions_are_held_out_whole_with_all_their_conversations(make: Any) -> None:
    data = make([conversation(f"c{i}", f"s{i // 2}", 3) for i in range(16)])
    train = {s.conversation for s in data.train.samples}
    held = {s.conversation for s in data.validation.samples}
    assert train and held and not train & held and len(train | held) == 16
    assert {int(name[1:]) // 2 for name in train}.isdisjoint({int(name[1:]) // 2 for name in held})
    assert 0.15 < len(held) / 16 < 0.45


def test_adding_a_session_moves_no_other_one_across(make: Any) -> None:
    few = make([conversation(f"c{i}", f"s{i}", 3) for i in range(12)])
    more = make([conversation(f"c{i}", f"s{i}", 3) for i in range(13)])
    before, after = ({s.conversation for s in data.validation.samples} for data in (few, more))
    assert len((before ^ after) - {"c12"}) <= 1  # at most the one at the border of the share


def test_of_a_single_session_the_last_part_is_held_out_and_shares_no_window(make: Any) -> None:
    data = make([conversation("only", "s", 40)])
    train = max(turn for s in data.train.samples for turn in s.turns)
    held = min(turn for s in data.validation.samples for turn in s.turns)
    assert train < held
    assert data.validation.report["supervised_tokens"] == pytest.approx(
        0.25 * (data.validation.report["supervised_tokens"] + data.train.report["supervised_tokens"]), rel=0.1
    )
    assert data.train.report["supervised_turns"] + data.validation.report["supervised_turns"] == 40


@pytest.mark.parametrize("small", [1, 3])
def test_a_session_that_outweighs_the_others_is_cut_instead_of_held_out(make: Any, small: int) -> None:
    """Found with two real sessions of 5 and 438 turns: the large one was held out, and 5 turns were trained."""
    parts = [conversation(f"small{i}", f"s{i}", 2) for i in range(small)] + [conversation("large", "l", 60)]
    for seed in range(4):
        data = make(parts, seed=seed)
        train, held = (part.report["supervised_tokens"] for part in (data.train, data.validation))
        assert 0.1 < held / (train + held) < 0.5
        assert {s.conversation for s in data.validation.samples} == {"large"}
        assert {s.conversation for s in data.train.samples} == {"large"} | {f"small{i}" for i in range(small)}
        assert "largest of" in data.choices["validation"]


def test_of_a_compacted_session_nothing_before_the_cut_is_held_out(make: Any) -> None:
    parts = [conversation("a", "s", 10), conversation("a/2", "s", 10, 10), conversation("a/3", "s", 10, 20)]
    data = make(parts)
    assert {s.conversation for s in data.train.samples} == {"a", "a/2", "a/3"}
    assert {s.conversation for s in data.validation.samples} == {"a/3"}
    assert max(t for s in data.train.samples if s.conversation == "a/3" for t in s.turns) < min(
        t for s in data.validation.samples for t in s.turns
    )


def test_every_turn_is_supervised_exactly_once_and_says_what_the_assistant_said(
    make: Any, tiny_model: Path
) -> None:
    from instep.rendering.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(tiny_model)
    data = make([conversation("only", "s", 40)])
    text = "".join(supervised_text([*data.train.samples, *data.validation.samples], tokenizer))
    assert text == "".join(f"Answer {turn} to only.<|im_end|>" for turn in range(40))


def test_turns_that_are_not_supervised_are_named(make: Any) -> None:
    first = conversation("a", "s1", 3)
    messages = list(first.messages)
    messages[3] = Message("assistant", "gone wrong", supervised=False)
    data = make([Conversation("a", tuple(messages), source={"session": "s1"}), conversation("b", "s2", 3)])
    reports = (data.train.report, data.validation.report)
    assert sum(r["dropped_turns"].get("not supervised in the data", 0) for r in reports) == 1
    assert sum(r["assistant_turns"] for r in reports) == 6
    assert sum(r["supervised_turns"] for r in reports) == 5
    assert json.dumps(data.report())


def test_the_fingerprint_follows_the_data(make: Any) -> None:
    base = [conversation(f"c{i}", f"s{i}", 3) for i in range(4)]
    assert make(base).fingerprint == make(base).fingerprint
    assert make(base).fingerprint != make([*base[:3], conversation("c9", "s3", 3)]).fingerprint


def test_nothing_left_to_train_on_is_said(make: Any) -> None:
    mute = Conversation("a", (Message("user", "hello"), Message("assistant", "no")), source={"session": "s"})
    with pytest.raises(InputError, match="no supervised token"):
        make([mute])
    with pytest.raises(InputError, match="min_context"):
        make([conversation("a", "s", 3)], rendering={"max_length": 100, "min_context": 100})
    with pytest.raises(InputError, match="context of 512"):
        make([conversation("a", "s", 3)], rendering={"max_length": 1000})


def test_rows_hold_every_sample_and_stay_within_the_row_length(make: Any) -> None:
    data = make([conversation(f"c{i}", f"s{i}", 1 + i % 5) for i in range(20)])
    lengths = [sum(len(data.train.samples[i]) for i in row) for row in data.order.rows]
    assert max(lengths) <= data.row_length == 160
    assert sum(lengths) == data.train.report["processed_tokens"]
    assert np.unique(np.concatenate(data.order.rows)).size == len(data.train.samples)


def test_a_conversation_that_the_template_fails_on_is_left_out_and_named(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Renderer.render

    def render(self: Renderer, conversation: Conversation, *more: Any) -> Any:
        if conversation.id.startswith("bad"):
            raise InputError(f"conversation {conversation.id}: the chat template fails on it")
        return whole(self, conversation, *more)

    monkeypatch.setattr(Renderer, "render", render)
    data = make([conversation("bad", "s0", 2), *(conversation(f"c{i}", f"s{i}", 3) for i in range(1, 9))])
    reports = (data.train.report, data.validation.report)
    assert sum(report["assistant_turns"] for report in reports) == 26
    assert sum(report["dropped_turns"].get(REFUSED, 0) for report in reports) == 2
    assert "conversation bad" in data.choices["left out"]
    with pytest.raises(InputError, match="conversation bad: the chat template fails"):
        make([conversation("bad", "s0", 2), conversation("bad2", "s1", 2)])
