"""The asked-for format: the one place that says how reasoning and answer are written and asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from instep.config import FewShot, TaskSettings
from instep.errors import InputError
from instep.records import Conversation, Message, StopReason
from instep.tasks.task import Task


@dataclass(frozen=True)
class Tags:
    """Names of the two tags, without angle brackets."""

    reasoning: str = "reasoning"
    answer: str = "answer"

    @property
    def marks(self) -> tuple[str, str, str, str]:
        """The four tags in the order in which a completion has them."""
        return (f"<{self.reasoning}>", f"</{self.reasoning}>", f"<{self.answer}>", f"</{self.answer}>")

    def write(self, reasoning: str, answer: str) -> str:
        """A completion in the asked-for format."""
        opened, closed, answer_opened, answer_closed = self.marks
        return f"{opened}\n{reasoning.strip()}\n{closed}\n{answer_opened}\n{answer.strip()}\n{answer_closed}"


def tags_of(settings: TaskSettings) -> Tags:
    return Tags(settings.reasoning_tag, settings.answer_tag)


def system_prompt(settings: TaskSettings) -> str:
    """The system message's text; empty where the settings leave it out."""
    if settings.system_prompt is not None:
        return settings.system_prompt
    example = tags_of(settings).write("...", "...")
    return (
        "Think about the question first, then give the answer alone, without units or explanation. "
        f"Respond in exactly this format:\n{example}"
    )


def few_shot_messages(examples: Sequence[FewShot], tags: Tags) -> tuple[Message, ...]:
    messages: list[Message] = []
    for example in examples:
        messages.append(Message("user", example.question))
        messages.append(Message("assistant", tags.write(example.reasoning, example.answer)))
    return tuple(messages)


def build_prompt(settings: TaskSettings, messages: Sequence[Message], where: str) -> tuple[Message, ...]:
    """System prompt, few-shot examples, then the task's own messages (whose system message, if any, wins).

    Raises InputError where the prompt does not end with the user's or a tool's message, or where it opens a
    tag that the rewards look for in the completion.
    """
    if not messages or messages[-1].role not in ("user", "tool"):
        last = messages[-1].role if messages else "nothing"
        raise InputError(f"{where}: a prompt must end with a user or tool message, but it ends with {last}")
    own = list(messages)
    head: list[Message] = []
    if own[0].role == "system":
        head.append(own.pop(0))
    elif text := system_prompt(settings):
        head.append(Message("system", text))
    tags = tags_of(settings)
    prompt = (*head, *few_shot_messages(settings.few_shot, tags), *own)
    for message in prompt:
        check_tags_closed(message.content, tags, f"{where}, {message.role} message")
    return prompt


def check_tags_closed(text: str, tags: Tags, where: str) -> None:
    """Raise InputError where `text` opens a tag and leaves it open.

    A completion that goes on from there would lack the opening tag that the format rewards look for, and be
    punished for what the prompt did. Use it on the rendered prompt too: some chat templates open a tag.
    """
    for name in (tags.reasoning, tags.answer):
        if text.rfind(f"<{name}>") > text.rfind(f"</{name}>"):
            raise InputError(
                f"{where}: the prompt opens <{name}> and does not close it, but the rewards look for it in "
                "the completion: close it in the prompt, or choose other tags"
            )


def demonstration(task: Task, tags: Tags) -> Conversation:
    """The task with its answer written in the asked-for format, for a supervised warm-up on the format.

    Raises InputError where the task has no answer.
    """
    if not task.answer:
        raise InputError(f"{task.id}: a task without an answer cannot be shown as an example")
    reply = tags.write(task.solution or f"The answer is {task.answer}.", task.answer)
    answered = Message("assistant", reply, stop=StopReason.END_OF_TURN, supervised=True)
    return Conversation(
        task.id, (*task.messages, answered), task.tools, {"format": "task", "task": task.source}
    )
