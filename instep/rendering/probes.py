"""Finds out what a chat template can render, by showing it sentinels and looking where they end up.

Raises InputError for a template that cannot give supervised tokens equal to what the assistant said.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from instep.errors import InputError
from instep.records import Message, ToolCall
from instep.rendering.chat import ChatTemplate, Unrenderable
from instep.rendering.dialect import TRIMS, Dialect, Layout
from instep.rendering.marks import Marks
from instep.rendering.spans import Rendering, productions
from instep.rendering.tokenizer import pattern_of
from instep.rendering.turns import Turn, dress, shape

Dicts = list[dict[str, Any]]
_PLAIN_OPTIONS: tuple[dict[str, Any], ...] = ({}, {"enable_thinking": False}, {"thinking": False})
_REASONING_OPTIONS: tuple[dict[str, Any], ...] = ({}, {"enable_thinking": True}, {"thinking": True})
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_AWKWARD = 'Zq1 "quoted" \\n <b>&amp;</b> {{ x }}\n\n    indented\té 文 🙂 end Zq2'
_SCHEMA = {
    "type": "function",
    "function": {
        "name": "zq_tool",
        "description": "Zq description",
        "parameters": {
            "type": "object",
            "properties": {"zq_key": {"type": "string", "description": "Zq parameter"}},
            "required": ["zq_key"],
        },
    },
}
_VALUE = 'zq"value\nline'


def probe(template: ChatTemplate, added: Sequence[str]) -> Dialect:
    """The template's dialect. `added` are the texts of the tokenizer's added tokens."""
    _check_basic(template)
    dialect = Dialect(system=_has_system(template), alternate=_must_alternate(template))
    dialect = replace(dialect, trims=_trims(template, dialect))
    dialect = _probe_tools(template, dialect)
    return _probe_layouts(template, dialect, added)


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _said(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def _in_order(text: str | None, *sentinels: str) -> bool:
    position = 0
    for sentinel in sentinels:
        found = -1 if text is None else text.find(sentinel, position)
        if found < 0:
            return False
        position = found + len(sentinel)
    return True


def _check_basic(template: ChatTemplate) -> None:
    messages = [_user("zqa"), _said("zqb"), _user("zqc"), _said("zqd")]
    try:
        text = template.render(messages)
        prompt = template.render(messages[:3], generation=True)
    except Unrenderable as error:
        raise InputError(
            f"the chat template fails on a plain user and assistant conversation ({error});"
            " use the template that the model was published with"
        ) from error
    if not _in_order(text, "zqa", "zqb", "zqc", "zqd") or not _in_order(prompt, "zqa", "zqb", "zqc"):
        raise InputError(
            "the chat template drops what was said: a user and assistant conversation does not show all its"
            " messages in order; use the template that the model was published with"
        )


def _has_system(template: ChatTemplate) -> bool:
    """Whether a system message is shown first, and stays where it is when the conversation goes on."""
    messages = [{"role": "system", "content": "zqs"}, _user("zqa"), _said("zqb"), _user("zqc"), _said("zqd")]
    text = template.try_render(messages)
    prompt = template.try_render(messages[:2], generation=True)
    if text is None or prompt is None:
        return False
    return (
        _in_order(text, "zqs", "zqa", "zqb", "zqc", "zqd")
        and _in_order(prompt, "zqs", "zqa")
        and text.startswith(prompt[: prompt.find("zqa") + 3])
    )


def _must_alternate(template: ChatTemplate) -> bool:
    users = [_user("zqa"), _user("zqb"), _said("zqc")]
    assistants = [_user("zqa"), _said("zqb"), _said("zqc"), _user("zqd"), _said("zqe")]
    opening = [_said("zqa"), _user("zqb"), _said("zqc")]
    return not (
        _in_order(template.try_render(users), "zqa", "zqb", "zqc")
        and _in_order(template.try_render(assistants), "zqa", "zqb", "zqc", "zqd", "zqe")
        and _in_order(template.try_render(opening), "zqa", "zqb", "zqc")
    )


def _trims(template: ChatTemplate, dialect: Dialect) -> dict[str, str]:
    """Role → weakest trimming under which the template shows a message's text letter by letter."""
    found = {}
    for role in ("system", "user", "assistant", "tool"):
        if role == "system" and not dialect.system:
            continue
        name = _trim_of(template, role)
        if name is None and role == "assistant":
            raise InputError(
                "the chat template changes the text of assistant messages (more than white space at their ends),"
                " so what is trained would not be what was said; use another template or model"
            )
        found[role] = name or "none"
    return found


def _trim_of(template: ChatTemplate, role: str) -> str | None:
    core = "Zqcore"
    padded = (f" \n\n  {_AWKWARD}  \n\n ", f"\n\n {_AWKWARD} \n\n")

    def conversations(text: str) -> list[Dicts]:
        entry = {"role": role, "content": text}
        if role == "assistant":
            return [[_user("a"), entry], [_user("a"), entry, _user("b"), _said("c")]]
        if role == "tool":
            call = {
                "id": "zqcall123",
                "type": "function",
                "function": {"name": "zq", "arguments": {"a": "b"}},
            }
            entry["tool_call_id"] = call["id"]
            return [[_user("a"), _said("", tool_calls=[call]), entry, _said("c")]]
        if role == "system":
            return [[entry, _user("a"), _said("b")]]
        return [[entry, _said("b"), _user("c")], [_user("a"), _said("b"), entry]]

    for name, trim in TRIMS.items():
        if all(
            (plain := template.try_render(before)) is not None
            and core in plain
            and template.try_render(after) == plain.replace(core, shown)
            for shown in map(trim, padded)
            for before, after in zip(conversations(core), conversations(shown), strict=True)
        ):
            return name
    return None


def _probe_tools(template: ChatTemplate, dialect: Dialect) -> Dialect:
    """Native tools where the template shows schemas, text beside calls, parallel calls and results; else inline."""
    for short_ids in (False, True):
        for as_text in (False, True):
            native = replace(dialect, tools="native", short_ids=short_ids, arguments_as_text=as_text)
            if _tools_survive(template, native):
                return native
    for role in ("tool", "user"):
        inline = replace(dialect, tools="inline", results=role)
        if role == "user" or _inline_results_survive(template, inline):
            return inline
    raise AssertionError("the user role is always accepted")


def _tool_messages(text: str) -> list[Message]:
    calls = tuple(
        ToolCall("zq_tool", {"zq_key": f"{number}{_VALUE}", "zq_count": 7}, f"call_zq_number_{number}")
        for number in (1, 2)
    )
    return [
        Message("system", "zqs"),
        Message("user", "zqu"),
        Message("assistant", text, tool_calls=calls),
        Message("tool", "zqr1", tool_call_id="call_zq_number_1", name="zq_tool"),
        Message("tool", "zqr2", tool_call_id="call_zq_number_2", name="zq_tool"),
        Message("assistant", text, tool_calls=calls[:1]),
        Message("tool", "zqr3", tool_call_id="call_zq_number_1", name="zq_tool"),
        Message("assistant", "zqlast"),
        Message("user", "zqagain"),
        Message("assistant", "zqend"),
    ]


def _dicts(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], dialect: Dialect) -> Dicts:
    turns = shape(messages, tools, dialect, reasoning=False)
    return dress(turns, dialect, Marks(pattern_of(())), wrap=False)[0]


def _tools_survive(template: ChatTemplate, dialect: Dialect) -> bool:
    escaped = json.dumps(_VALUE)[1:-1]
    for text in ("zqtext", ""):
        entries = _dicts(_tool_messages(text), [_SCHEMA], dialect)
        shown = template.try_render(entries, [_SCHEMA])
        opening = (_tool_messages(text)[:2], _tool_messages(text)[1:2])
        prompt, without_system = (
            template.try_render(_dicts(messages, [_SCHEMA], dialect), [_SCHEMA], generation=True)
            for messages in opening
        )
        calls = [[*([text] if text else []), "zq_tool", f"1{value}"] for value in (escaped, _VALUE)]
        if not any(
            _in_order(
                shown, "zqu", *call, f"2{value}", "zqr1", "zqr2", *call, "zqr3", "zqlast", "zqagain", "zqend"
            )
            for call, value in zip(calls, (escaped, _VALUE), strict=True)
        ):
            return False
        schema = ("zq_tool", "Zq description", "zq_key")
        if not (_in_order(prompt, *schema) and _in_order(without_system, *schema)):
            return False
        if shown is not None and ("'zq_key'" in shown or '\\"zq_key' in shown):
            return False  # arguments shown as a Python literal, or as a string inside JSON
    return True


def _inline_results_survive(template: ChatTemplate, dialect: Dialect) -> bool:
    messages = _tool_messages("zqtext")
    messages[3] = replace(messages[3], content=_AWKWARD)
    shown = template.try_render(_dicts(messages, [_SCHEMA], dialect))
    return _in_order(shown, "zqtext", _AWKWARD, "zqr2", "zqtext", "zqr3", "zqlast", "zqagain", "zqend")


def _probe_layouts(template: ChatTemplate, dialect: Dialect, added: Sequence[str]) -> Dialect:
    kinds = {"content": Message("assistant", "zqtext")}
    if dialect.tools == "native":
        kinds["call"] = _tool_messages("")[2]
    layouts: dict[str, Layout] = {}
    options, layouts["content"] = _layout(template, dialect, kinds["content"], _PLAIN_OPTIONS, added, None)
    if "call" in kinds:
        stop = layouts["content"].stop
        _, layouts["call"] = _layout(template, dialect, kinds["call"], (options,), added, stop)
    dialect = replace(dialect, plain_options=options)
    for key in _REASONING_KEYS:
        thinking = replace(dialect, reasoning_key=key)
        message = Message("assistant", "zqtext", reasoning="zqthought")
        entries = dress(
            shape([Message("user", "a"), message], (), thinking, True), thinking, Marks(pattern_of(())), False
        )
        shown = template.try_render(entries[0])
        if _in_order(shown, "zqthought", "zqtext"):
            reasoning_options, layouts["reasoning"] = _layout(
                template, thinking, message, _REASONING_OPTIONS, added, layouts["content"].stop
            )
            dialect = replace(thinking, reasoning_options=reasoning_options)
            break
    return replace(dialect, layouts=layouts)


def _layout(
    template: ChatTemplate,
    dialect: Dialect,
    message: Message,
    candidates: Sequence[Mapping[str, Any]],
    added: Sequence[str],
    stop: str | None,
) -> tuple[Mapping[str, Any], Layout]:
    """The options under which the generation prompt is what stands before the turn, and how it is framed."""
    marks = Marks(pattern_of(()))
    turns: list[Turn] = shape([Message("user", "zqu"), message], (), dialect, reasoning=True)
    entries, _ = dress(turns, dialect, marks, wrap=True)
    best: tuple[int, Mapping[str, Any], Layout] | None = None
    for options in candidates:
        try:
            prompt, _ = marks.read(template.render(entries[:-1], generation=True, options=options))
            text, items = marks.read(template.render(entries, options=options))
        except Unrenderable as error:
            raise InputError(f"the chat template fails on a {_kind_name(message)} ({error})") from error
        mine = [item for item in items if item.start >= text.find("zqu") + 3]
        if not mine:
            raise InputError(f"the chat template does not show a {_kind_name(message)} where it was said")
        kept = len(prompt)
        while not text.startswith(prompt[:kept]):
            kept -= 1
        dropped = prompt[kept:]
        if dropped.strip() and "think" not in dropped:
            raise InputError(
                "the chat template's generation prompt is not what it writes before an assistant turn"
                f" ({dropped.strip()[:40]!r} is missing there); use another template or model"
            )
        lead = text[kept : mine[0].start]
        layout = Layout(lead, _stop_token(text[mine[-1].end :], added, stop), dropped)
        rank = 2 * bool(dropped) + bool(lead.strip() and not message.tool_calls and not message.reasoning)
        if best is None or rank < best[0]:
            best = rank, options, layout
    assert best is not None
    return best[1], best[2]


def _kind_name(message: Message) -> str:
    return "turn with tool calls" if message.tool_calls else "plain assistant turn"


def _stop_token(tail: str, added: Sequence[str], stop: str | None) -> str:
    """The end-of-turn token in what the template writes after a turn's last field; `stop` where it is there."""
    tokens = [match for match in pattern_of(added).finditer(tail)]
    chosen = next((match for match in tokens if match[0] == stop), None)
    if chosen is None and stop is None:
        chosen = tokens[0] if tokens else None
    if chosen is None and stop is not None:
        after = [match for match in tokens if not tail[match.end() :].strip()]
        chosen = after[0] if after else None
    if chosen is None or (stop is None and tail[: chosen.start()].strip()):
        raise InputError(
            "the chat template ends an assistant turn without an end-of-turn token"
            f" (after the text it writes {tail[:30]!r}), so a model could not learn to stop; use another template"
        )
    return chosen[0]


def framing_tokens(template: ChatTemplate, dialect: Dialect, added: Sequence[str]) -> set[str]:
    """Added tokens that the template writes outside of what was said: a message must not be able to fake them."""
    tools = [_SCHEMA] if dialect.tools == "native" else []
    turns = shape(_tool_messages("zqtext"), tools, dialect, reasoning=False)
    marks = Marks(pattern_of(()))
    entries, owners = dress(turns, dialect, marks, wrap=True)
    marked = template.render(entries, tools, generation=True, options=dialect.plain_options)
    text, items = marks.read(marked)
    rendering = Rendering(text, tuple(items), owners)
    said = [(item.start, item.end) for item in items]
    said += [(one.start, one.end) for one in productions(rendering, turns, dialect)]
    found = set()
    position = 0
    pattern = pattern_of(added)
    for start, end in sorted(said):
        found.update(pattern.findall(text[position : max(position, start)]))
        position = max(position, end)
    found.update(pattern.findall(text[position:]))
    return found
