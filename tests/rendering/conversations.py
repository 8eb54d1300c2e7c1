"""Conversations for the rendering tests, and how to read supervised tokens back."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from instep.records import Conversation, Message, StopReason, ToolCall

READ = {
    "type": "function",
    "function": {
        "name": "read",
        "description": "Read a file",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}


def user(text: str) -> Message:
    return Message("user", text)


def said(text: str, *calls: ToolCall, supervised: bool = True, **more: Any) -> Message:
    stop = StopReason.TOOL_CALL if calls else StopReason.END_OF_TURN
    return Message("assistant", text, tool_calls=calls, supervised=supervised, **{"stop": stop, **more})


def call(path: str, number: int = 1) -> ToolCall:
    return ToolCall("read", {"path": path, "limit": 20}, f"call_{number}")


def result(text: str, number: int = 1) -> Message:
    return Message("tool", text, tool_call_id=f"call_{number}", name="read")


def agent_session(system: bool = True) -> Conversation:
    """Text, calls alone, text with calls, parallel calls, an unsupervised turn, a cut turn."""
    messages = (
        Message("system", "You are an agent.\nBe brief."),
        user("Fix the tests."),
        said("I read it first.", call("src/app.py")),
        result("def main():\n    return 1\n"),
        said("", call("a.py", 2), call('b "quoted".py', 3)),
        result('{"a": [1, 2]}', 2),
        result("naïve 文 🙂", 3),
        said("Done: it works.\n\n    indented\n```py\nx = 1\n```"),
        user("Thanks. And why?"),
        said("Not trained.", supervised=False),
        user("Go on."),
        said("Because the file is", stop=StopReason.LENGTH),
    )
    return Conversation("agent", messages if system else messages[1:], (READ,))


def supervised_text(tokenizer: Any, renderings: list[Any]) -> dict[int, str]:
    """Message → its supervised tokens, decoded. A message supervised in two renderings fails."""
    found: dict[int, str] = {}
    for rendered in renderings:
        for index in np.unique(rendered.message[rendered.weight > 0]).tolist():
            assert index not in found, f"message {index} is supervised twice"
            mine = rendered.tokens[(rendered.weight > 0) & (rendered.message == index)]
            found[index] = decoded(tokenizer, mine)
    return found


def decoded(tokenizer: Any, tokens: np.ndarray) -> str:
    return tokenizer.decode(tokens.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def inline_said(message: Message, stop: str) -> str:
    """What invariant 1 asks for where calls are written into the text."""
    calls = [
        "<tool_call>\n"
        + json.dumps({"name": one.name, "arguments": dict(one.arguments)}, ensure_ascii=False)
        + "\n</tool_call>"
        for one in message.tool_calls
    ]
    text = "\n".join([*([message.content] if message.content else []), *calls])
    return text + ("" if message.stop is StopReason.LENGTH else stop)
