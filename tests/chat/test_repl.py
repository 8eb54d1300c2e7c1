"""The conversation in the terminal, driven by a script of lines on a real (tiny) model."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import instep
from instep import sessions
from instep.chat.model import ChatModel
from instep.chat.repl import Chat, Repl


@pytest.fixture(scope="module")
def model(trained_run: Path) -> ChatModel:
    return instep.load(trained_run, engine="torch", temperature=0.0, max_new_tokens=8)


class Terminal:
    """Lines to type; an exception in their place is raised. Keeps what was shown and noted."""

    def __init__(self, model: ChatModel, lines: list[str | type[BaseException]]) -> None:
        self.chat = Chat(model)
        self.shown, self.notes, self.prompts = [], [], []
        self._lines: Iterator[str | type[BaseException]] = iter(lines)
        self.on_show: Callable[[], None] = lambda: None
        Repl(
            self.chat, self._read, self._show, self.notes.append, lambda answer: f"{len(answer.tokens)} t"
        ).run()

    def _read(self, prompt: str) -> str:
        self.prompts.append(prompt)
        line = next(self._lines, EOFError)
        if isinstance(line, str):
            return line
        raise line

    def _show(self, piece: str) -> None:
        self.shown.append(piece)


def test_a_conversation_goes_on(model: ChatModel) -> None:
    one = Terminal(model, ["Count to 3", "", "and on"])
    first = model.chat("Count to 3")
    roles = [message["role"] for message in one.chat.messages]
    assert roles == ["user", "assistant", "user", "assistant"]
    assert one.chat.messages[1]["content"] == first.text
    second = model.chat([*one.chat.messages[:2], {"role": "user", "content": "and on"}])
    assert one.chat.messages[3]["content"] == second.text
    assert "".join(one.shown) == f"{first.text}\n{second.text}\n"


def test_many_lines_make_one_message(model: ChatModel) -> None:
    one = Terminal(model, ["first \\", "second", '"""', "a", "", 'b"""', '"""one line"""', '"""open', "end"])
    asked = [message["content"] for message in one.chat.messages if message["role"] == "user"]
    assert asked == ["first \nsecond", "a\n\nb", "one line", "open\nend"]
    assert "… " in one.prompts


def test_commands(model: ChatModel, tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    one = Terminal(
        model,
        [
            "/stats", "/system Be brief.", "Count", "/stats", f"/save {file}", f"/save {file}", "/save", "/nothing",
            "/adapter off", "Count", "/adapter maybe", "/reset", "/system -", "//literal", "/help", "/quit", "never",
        ],
    )  # fmt: skip
    notes = "\n".join(one.notes)
    expected = [
        "no answer yet",
        "system prompt: Be brief.",
        "8 t",
        "exists already",
        "needs the name of a file",
    ]
    expected += ["/nothing is no command", "adapter off", "expected on or off", "is forgotten", "/save FILE"]
    for words in expected:
        assert words in notes, words
    assert [m["content"] for m in one.chat.messages if m["role"] == "user"] == ["/literal"]
    row = json.loads(file.read_text())
    assert [message["role"] for message in row["messages"]] == ["system", "user", "assistant"]
    # The file is what `instep sft --data` reads; a turn that was cut is no example.
    assert row["messages"][2]["weight"] == 0


def test_what_is_saved_can_be_trained_on(model: ChatModel, tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    chat = Chat(
        model, messages=[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    )
    chat.save(file)
    (conversation,), _ = sessions.load(file)
    assert [(m.role, m.content, m.supervised) for m in conversation.messages] == [
        ("user", "Hi", False),
        ("assistant", "Hello", True),
    ]


def test_control_c_stops_the_answer_and_not_the_program(model: ChatModel) -> None:
    class Impatient(Terminal):
        def _show(self, piece: str) -> None:
            super()._show(piece)
            if len(self.shown) == 2:
                os.kill(os.getpid(), signal.SIGINT)

    one = Impatient(model, [KeyboardInterrupt, "Count to 3", "and on", "/quit"])
    assert any("/quit or Ctrl-D" in note for note in one.notes)
    assert "(stopped)" in one.notes
    said = [message for message in one.chat.messages if message["role"] == "assistant"]
    assert len(said) == 2 and said[0]["weight"] == 0
    assert said[0]["content"] == "".join(one.shown).partition("\n")[0]
    assert model.chat("Count to 3").text.startswith(said[0]["content"])


def test_a_turn_that_does_not_fit_leaves_the_history_alone(model: ChatModel) -> None:
    one = Terminal(model, ["Count", "word " * 600, "Count again"])
    assert any("context" in note for note in one.notes)
    assert len(one.chat.messages) == 4
