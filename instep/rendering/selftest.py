"""The test that every template passes before it is used: are the supervised tokens what the assistant said?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from instep.errors import InputError
from instep.records import Conversation, Message, StopReason, ToolCall

if TYPE_CHECKING:
    from instep.rendering.template import Renderer

_SYSTEM = "Zqsystem instructions"
_SCHEMA = {
    "type": "function",
    "function": {
        "name": "zqtool",
        "description": "Zqdescription",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
    },
}


def _conversation(stop: str) -> Conversation:
    """Text with the end-of-turn token spelled out in every place that a session can bring one."""
    call = ToolCall("zqtool", {"path": "zqargument", "count": 3}, "call_zq_0001")
    ended = StopReason.END_OF_TURN
    return Conversation(
        "self-test",
        (
            Message("system", f"{_SYSTEM} {stop}"),
            Message("user", f"zquser one {stop}\n"),
            Message("assistant", f"zqanswer one\n\n  and {stop} more", stop=ended, supervised=True),
            Message("user", "zquser two"),
            Message(
                "assistant", "zqanswer two", tool_calls=(call,), stop=StopReason.TOOL_CALL, supervised=True
            ),
            Message("tool", f"zqresult {stop} one", tool_call_id=call.id, name=call.name),
            Message("assistant", "", tool_calls=(call,), stop=StopReason.TOOL_CALL, supervised=True),
            Message("tool", "zqresult two", tool_call_id=call.id, name=call.name),
            Message("assistant", "zqanswer three", stop=ended, supervised=True),
            Message("user", "zquser three"),
            Message("assistant", "zqanswer cut", stop=StopReason.LENGTH, supervised=True),
        ),
        (_SCHEMA,),
    )


def check(renderer: Renderer) -> None:
    """Raise InputError with the reason where the renderer breaks invariant 1 on a conversation of sentinels."""
    stop = renderer.dialect.layout("content").stop
    stops = {layout.stop for layout in renderer.dialect.layouts.values()}
    conversation = _conversation(stop)
    renderings = renderer.render(conversation)
    said: dict[int, str] = {}
    for rendered in renderings:
        if rendered.weight[0]:
            raise _refused("its first token is supervised")
        for index in np.unique(rendered.message[rendered.weight > 0]).tolist():
            mine = rendered.tokens[(rendered.weight > 0) & (rendered.message == index)]
            said[index] = said.get(index, "") + decode(renderer, mine)
    for index, message in enumerate(conversation.messages):
        if message.role != "assistant":
            if index in said:
                raise _refused(f"a {message.role} message would be trained on")
            continue
        text = said.get(index, "").removeprefix(" ")
        ended = next((text.removesuffix(one) for one in stops if text.endswith(one)), None)
        if (ended is None) != (message.stop is StopReason.LENGTH):
            raise _refused(
                "the end-of-turn token is not supervised where a turn ended, or is where it did not"
            )
        body = text if ended is None else ended
        content = renderer.dialect.trim("assistant", message.content)
        if message.tool_calls:
            exact = body.startswith(content) and "zqtool" in body and "zqargument" in body
        else:
            exact = body.strip() == content.strip()
        if not exact:
            raise _refused(f"an answer {content!r} would be trained as {body!r}")
    _check_context(renderer, conversation, decode(renderer, renderings[-1].tokens))


def _check_context(renderer: Renderer, conversation: Conversation, text: str) -> None:
    for sentinel in (_SYSTEM, "Zqdescription", "zquser one", "zqresult", "zquser three"):
        if sentinel not in text:
            raise _refused(f"{sentinel!r} is not shown to the model")
    for index in (2, 10):
        prompt = renderer.prompt(conversation.messages[:index], conversation.tools)
        begins = [
            one for one in renderer.render(conversation) if np.array_equal(one.tokens[: len(prompt)], prompt)
        ]
        if not begins:
            raise _refused("the prompt of a turn is not what its training tokens begin with")


def decode(renderer: Renderer, tokens: np.ndarray) -> str:
    return renderer.tokenizer.decode(
        tokens.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )


def _refused(reason: str) -> InputError:
    return InputError(f"the chat template fails its self-test: {reason}; use another template or model")
