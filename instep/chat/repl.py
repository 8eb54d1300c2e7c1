"""A conversation in the terminal: history, commands, answers that can be interrupted."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from instep.chat.interrupt import Interrupt
from instep.chat.model import Answer, ChatModel
from instep.errors import InputError
from instep.files import refuse_output, write_atomically
from instep.records import StopReason

BLOCK = '"""'
HELP = f"""\
/reset          forget the conversation, keep the system prompt
/system TEXT    set the system prompt; without TEXT show it, /system - removes it
/adapter on|off answer with the adapter, or as the base model
/save FILE      write the conversation as JSONL, as `instep sft --data` reads it
/stats          how long the last answer took
/help           this list
/quit           leave (as does Ctrl-D)
A line that ends with \\ goes on in the next one; between {BLOCK} and {BLOCK} there can be many lines.
A line that begins with // is sent with one / less. Ctrl-C ends an answer, not the program."""


@dataclass
class Chat:
    """The conversation so far, with one model."""

    model: ChatModel
    tools: list[dict[str, Any]] = field(default_factory=list)
    system: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    adapter: bool = True
    last: Answer | None = None

    def _all(self) -> list[dict[str, Any]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return system + self.messages

    def ask(self, text: str, on_text: Callable[[str], None] | None = None) -> Answer:
        """One turn. What Ctrl-C leaves of an answer stays in the history; a turn without any answer does not.

        Raises InputError, the history unchanged, where the turn does not fit the model's context.
        """
        asked = {"role": "user", "content": text}
        with Interrupt() as interrupt:
            answer = self.model.chat(
                [*self._all(), asked],
                self.tools,
                on_text=on_text,
                stop=lambda: interrupt.asked,
                adapter=self.adapter,
            )
        self.last = answer
        if answer.text or answer.stop is StopReason.END_OF_TURN:
            said: dict[str, Any] = {"role": "assistant", "content": answer.text}
            if answer.stop is not StopReason.END_OF_TURN:
                said["weight"] = 0  # nobody should be trained on a turn that was cut
            self.messages += [asked, said]
        return answer

    def save(self, file: Path) -> None:
        """One row of chat JSONL. Raises InputError where the file exists or cannot be written."""
        if not self.messages:
            raise InputError("there is nothing to save yet")
        refuse_output(file, "/save", force=False)
        row: dict[str, Any] = {"messages": self._all()}
        if self.tools:
            row["tools"] = self.tools
        write_atomically(file, json.dumps(row, ensure_ascii=False) + "\n")


class Repl:
    """Reads lines, answers, obeys commands. `read(prompt)` raises EOFError at the end of input."""

    def __init__(
        self,
        chat: Chat,
        read: Callable[[str], str],
        show: Callable[[str], None],
        note: Callable[[str], None],
        describe: Callable[[Answer], str],
        always_stats: bool = False,
    ) -> None:
        self.chat = chat
        self._read, self._show, self._note, self._describe = read, show, note, describe
        self._always_stats = always_stats

    def run(self) -> None:
        """Until /quit or the end of input."""
        while True:
            try:
                text = self._message()
            except EOFError:
                return
            except KeyboardInterrupt:
                self._note("\n/quit or Ctrl-D leaves")
                continue
            try:
                if text.startswith("/") and not text.startswith("//"):
                    if not self._command(text):
                        return
                elif text.strip():
                    self._answer(text.removeprefix("/") if text.startswith("//") else text)
            except InputError as error:
                self._note(f"instep: {error}")
            except KeyboardInterrupt:
                self._note("\nthe answer was dropped")

    def _message(self) -> str:
        """What the user types as one message, which may have several lines."""
        line = self._read("> ")
        if line.strip().startswith(BLOCK):
            return self._block(line.strip().removeprefix(BLOCK))
        lines = []
        while line.endswith("\\"):
            lines.append(line[:-1])
            try:
                line = self._read("… ")
            except EOFError:
                line = ""
        return "\n".join([*lines, line])

    def _block(self, line: str) -> str:
        lines = []
        while BLOCK not in line:
            lines.append(line)
            try:
                line = self._read("… ")
            except EOFError:
                line = BLOCK
        lines.append(line.partition(BLOCK)[0])
        return "\n".join(lines).strip("\n")

    def _answer(self, text: str) -> None:
        answer = self.chat.ask(text, self._show)
        self._show("\n")
        if answer.stop is StopReason.ABORTED:
            self._note("(stopped)")
        elif answer.stop is StopReason.LENGTH:
            self._note("(cut at max_new_tokens or the model's context)")
        if self._always_stats:
            self._note(self._describe(answer))

    def _command(self, line: str) -> bool:
        """False where it was /quit. Raises InputError for a command that is not known or lacks something."""
        name, _, rest = line.strip().partition(" ")
        rest = rest.strip()
        match name:
            case "/quit" | "/exit":
                return False
            case "/help":
                self._note(HELP)
            case "/reset":
                self.chat.messages.clear()
                self._note("the conversation is forgotten")
            case "/system":
                self._system(rest)
            case "/adapter":
                self._adapter(rest)
            case "/save":
                if not rest:
                    raise InputError("/save needs the name of a file, such as /save chat.jsonl")
                self.chat.save(Path(rest).expanduser())
                self._note(f"saved to {rest}")
            case "/stats":
                last = self.chat.last
                self._note("no answer yet" if last is None else self._describe(last))
            case _:
                raise InputError(
                    f"{name} is no command; /help lists them, and // sends a line that begins with /"
                )
        return True

    def _system(self, text: str) -> None:
        if text:
            self.chat.system = None if text == "-" else text
        self._note(f"system prompt: {self.chat.system or 'none'}")

    def _adapter(self, text: str) -> None:
        if self.chat.model.settings.adapter is None:
            raise InputError("there is no adapter: start with --adapter RUN")
        if text not in ("on", "off"):
            raise InputError(f"/adapter {text}: expected on or off")
        self.chat.adapter = text == "on"
        self._note(f"adapter {text}")
