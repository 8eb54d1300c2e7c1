"""A JSONL file of one's own: `prompt` or `messages`, `answer`, and extra columns that rewards are handed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from instep.config import TaskSettings
from instep.errors import InputError
from instep.records import Message
from instep.tasks.prompts import build_prompt
from instep.tasks.rows import read_rows
from instep.tasks.task import RESERVED_COLUMNS, Task, Tasks, keep_apart, question_hash

KNOWN = ("prompt", "messages", "answer", "solution", "tools", "id")
ROLES = ("system", "user", "assistant", "tool")


def load_own(settings: TaskSettings, answers_required: bool) -> Tasks:
    """Tasks of the file `settings.name`; held out is `test_path`, or `test_share` of the questions by hash.

    Raises InputError that names file and line.
    """
    path = Path(settings.name).expanduser()
    tasks = _read(settings, path, path.stem, answers_required)
    if settings.test_path is not None:
        held_out = Path(settings.test_path).expanduser()
        return keep_apart(path.stem, tasks, _read(settings, held_out, held_out.stem, answers_required))
    # By hash and not by position: a task stays on its side when others are added.
    border = settings.test_share * 16**8
    test = [task for task in tasks if int(question_hash(task.question)[:8], 16) < border]
    train = [task for task in tasks if int(question_hash(task.question)[:8], 16) >= border]
    return keep_apart(path.stem, train, test)


def _read(settings: TaskSettings, path: Path, name: str, answers_required: bool) -> list[Task]:
    tasks = []
    for where, row in read_rows(path):
        reserved = sorted(set(row) & set(RESERVED_COLUMNS))
        if reserved:
            raise InputError(
                f"{where}: the column {reserved[0]!r} is filled in for every sample: rename yours"
            )
        messages = _messages(row, where)
        tasks.append(
            Task(
                id=str(row.get("id") or where),
                question="\n".join(message.content for message in messages),
                messages=build_prompt(settings, messages, where),
                answer=_answer(row, where, answers_required),
                source=name,
                solution=_text(row, "solution", where),
                tools=_tools(row, where),
                columns={key: value for key, value in row.items() if key not in KNOWN},
            )
        )
    return tasks


def _messages(row: Mapping[str, Any], where: str) -> list[Message]:
    if ("prompt" in row) == ("messages" in row):
        raise InputError(f"{where}: expected either 'prompt' or 'messages', found the columns {sorted(row)}")
    if "prompt" in row:
        text = _text(row, "prompt", where)
        if not text.strip():
            raise InputError(f"{where}: the prompt is empty")
        return [Message("user", text)]
    given = row["messages"]
    if not isinstance(given, list) or not given:
        raise InputError(f"{where}: 'messages' must be a list of {{role, content}}, found {str(given)[:60]}")
    messages = []
    for item in given:
        role, content = (item.get("role"), item.get("content")) if isinstance(item, dict) else (None, None)
        if role not in ROLES or not isinstance(content, str):
            raise InputError(
                f"{where}: a message is a role ({', '.join(ROLES)}) and a text content, found {str(item)[:50]}"
            )
        messages.append(Message(role, content))
    return messages


def _answer(row: Mapping[str, Any], where: str, required: bool) -> str:
    answer = row.get("answer")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float | None):
        raise InputError(f"{where}: 'answer' must be a text or a number, found {str(answer)[:60]}")
    text = "" if answer is None else str(answer).strip()
    if required and not text:
        raise InputError(f"{where}: a task without an answer, which the rewards need: add 'answer'")
    return text


def _text(row: Mapping[str, Any], column: str, where: str) -> str:
    value = row.get(column) or ""
    if not isinstance(value, str):
        raise InputError(f"{where}: {column!r} must be a text, found {str(value)[:60]}")
    return value


def _tools(row: Mapping[str, Any], where: str) -> tuple[Mapping[str, Any], ...]:
    tools = row.get("tools") or []
    for tool in tools if isinstance(tools, list) else [tools]:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            shape = '{"type": "function", "function": {"name": …, "parameters": …}}'
            raise InputError(f"{where}: a tool must be {shape}, found {str(tool)[:60]}")
        _check_schema(function, where)
    return tuple(tools)


def _check_schema(function: Mapping[str, Any], where: str) -> None:
    try:
        import jsonschema
        from jsonschema.validators import validator_for
    except ImportError as error:
        raise InputError(f"{where}: tasks with tools need jsonschema: pip install jsonschema") from error
    schema = function.get("parameters") or {}
    kind = validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise InputError(f"{where}: tool {function['name']}: not a JSON schema: {error.message}") from error
