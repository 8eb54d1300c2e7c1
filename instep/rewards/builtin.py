"""The built-in rewards. Each has the documented signature and a maximum that the gold answer, written in the
asked-for format, earns (0 for `length`, which only punishes; 1 for the others)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from instep.rewards.answers import Verdict, extract_answer, parse_number
from instep.rewards.judge import Judge
from instep.tasks.prompts import Tags

Reward = Callable[
    [Sequence[str], Sequence[str], Sequence[Sequence[Mapping[str, Any]]], Mapping[str, Sequence[Any]]],
    list[float | None],
]


@dataclass(frozen=True)
class Context:
    """What a built-in reward is made from."""

    tags: Tags
    judge: Judge
    max_new_tokens: int
    overlong_tokens: int


def correctness(context: Context) -> Reward:
    """1 where the answer is the task's, 0 where it is wrong or missing; needs the task's answer."""

    def reward(prompts, completions, messages, columns) -> list[float | None]:
        verdicts = context.judge.verdicts(completions, columns["answer"], columns["gym"])
        return [float(verdict is Verdict.CORRECT) for verdict in verdicts]

    return reward


def integer(context: Context) -> Reward:
    """1 where the answer is a whole number; does not apply where the task's own is not one."""

    def whole(text: str | None) -> bool:
        number = parse_number(text) if text else None
        return number is not None and number.value.denominator == 1

    def reward(prompts, completions, messages, columns) -> list[float | None]:
        return [
            float(whole(extract_answer(completion, context.tags))) if whole(gold) else None
            for completion, gold in zip(completions, columns["answer"], strict=True)
        ]

    return reward


def strict_format(context: Context) -> Reward:
    """1 where the completion is the two tagged parts, each tag on its own line, and nothing else."""
    opened, closed, answer_opened, answer_closed = map(re.escape, context.tags.marks)
    layout = re.compile(rf"{opened}\n(.+)\n{closed}\n{answer_opened}\n(.+)\n{answer_closed}\n?", re.DOTALL)

    def reward(prompts, completions, messages, columns) -> list[float | None]:
        return [float(_laid_out(layout.fullmatch(text), context.tags)) for text in completions]

    return reward


def soft_format(context: Context) -> Reward:
    """1 where the two parts stand in the completion in this order, whatever the spacing and what is around."""
    opened, closed, answer_opened, answer_closed = map(re.escape, context.tags.marks)
    layout = re.compile(rf"{opened}(.+?){closed}\s*{answer_opened}(.+?){answer_closed}", re.DOTALL)

    def reward(prompts, completions, messages, columns) -> list[float | None]:
        return [float(_laid_out(layout.search(text), context.tags)) for text in completions]

    return reward


def _laid_out(match: re.Match[str] | None, tags: Tags) -> bool:
    """Both parts say something, and no tag hides inside them."""
    return match is not None and all(
        part.strip() and not any(mark in part for mark in tags.marks) for part in match.groups()
    )


def tag_count(context: Context) -> Reward:
    """A quarter for each of the four tags that stands there exactly once: a slope towards the format."""

    def reward(prompts, completions, messages, columns) -> list[float | None]:
        return [sum(text.count(mark) == 1 for mark in context.tags.marks) / 4 for text in completions]

    return reward


def length(context: Context) -> Reward:
    """Soft overlong punishment (DAPO, arXiv 2503.14476, eq. 13): 0 up to max_new_tokens − overlong_tokens, then
    linearly down to −1 at max_new_tokens."""
    border = context.max_new_tokens - context.overlong_tokens

    def reward(prompts, completions, messages, columns) -> list[float | None]:
        return [
            -min(max(tokens - border, 0) / context.overlong_tokens, 1.0) + 0.0
            for tokens in columns["completion_tokens"]
        ]

    return reward


def valid_tool_call(context: Context) -> Reward:
    """1 where the completion calls tools and every call names one of the task's and fits its JSON schema; does
    not apply to tasks without tools."""

    def reward(prompts, completions, messages, columns) -> list[float | None]:
        return [
            _calls_are_valid(text, extract_answer(text, context.tags), tools) if tools else None
            for text, tools in zip(completions, columns["tools"], strict=True)
        ]

    return reward


TOOL_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


def _calls_are_valid(text: str, answer: str | None, tools: Sequence[Mapping[str, Any]]) -> float:
    """`<tool_call>` blocks, or else the answer, or else the whole text, as JSON of one call or a list of them."""
    written = TOOL_CALL.findall(text) or [answer or text]
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    calls: list[Any] = []
    try:
        for block in written:
            call = json.loads(block)
            calls.extend(call if isinstance(call, list) else [call])
        return float(bool(calls) and all(_fits(call, schemas) for call in calls))
    except (ValueError, RecursionError):
        return 0.0


def _fits(call: Any, schemas: Mapping[str, Mapping[str, Any]]) -> bool:
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        call = call["function"]
    if not isinstance(call, dict) or not isinstance(name := call.get("name"), str) or name not in schemas:
        return False
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    return isinstance(arguments, dict) and schema_validator(schemas[name]).is_valid(arguments)


def schema_validator(schema: Mapping[str, Any]) -> Any:
    """A validator that fetches nothing from the network; the schema was checked when the task was read."""
    import jsonschema
    from jsonschema.validators import validator_for
    from referencing import Registry

    kind = validator_for(schema, default=jsonschema.Draft202012Validator)
    return kind(schema, registry=Registry())


BUILTIN: dict[str, Callable[[Context], Reward]] = {
    "correctness": correctness,
    "integer": integer,
    "strict_format": strict_format,
    "soft_format": soft_format,
    "tag_count": tag_count,
    "length": length,
    "valid_tool_call": valid_tool_call,
}
NEED_ANSWERS = frozenset({"correctness", "integer"})
