"""An Ollama Modelfile: the chat template in Ollama's language, made from what the model's own template writes.

The frames around system, user and assistant messages are read off the template with sentinels, and the result is
compared with the template on a conversation: a template that does not frame its messages so is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

from instep.errors import InputError
from instep.rendering.chat import ChatTemplate, Unrenderable
from instep.rendering.template import Renderer

_SYSTEM, _USER, _ASSISTANT, _AGAIN = "zqsystem", "zquser", "zqassistant", "zqagain"


@dataclass(frozen=True)
class Frames:
    """What stands before and after each kind of message; `begin` opens the text, `default_system` is what the
    template says where no system message is given."""

    begin: str
    system: tuple[str, str]
    user: tuple[str, str]
    assistant: tuple[str, str]
    default_system: str | None

    def write(self, messages: list[tuple[str, str]]) -> str:
        """(role, content) messages and the opening of the next answer."""
        if self.default_system is not None and messages[0][0] != "system":
            messages = [("system", self.default_system), *messages]
        frames = {"system": self.system, "user": self.user, "assistant": self.assistant}
        text = "".join(frames[role][0] + content + frames[role][1] for role, content in messages)
        return self.begin + text + self.assistant[0]


def read_frames(renderer: Renderer) -> Frames:
    """Raises InputError where the template is more than frames around messages."""
    template = ChatTemplate(renderer.tokenizer)
    user, answer = {"role": "user", "content": _USER}, {"role": "assistant", "content": _ASSISTANT}
    system, again = {"role": "system", "content": _SYSTEM}, {"role": "user", "content": _AGAIN}
    try:
        whole = template.render([system, user, answer, again], generation=True)
        closed = template.render([system, user])
        bare = template.render([user], generation=True)
        head, rest = whole.split(_SYSTEM)
        between, rest = rest.split(_USER)
        opening, rest = rest.split(_ASSISTANT)
        after, _ = rest.split(_AGAIN)
        user_end = closed.split(_USER)[1]
    except (Unrenderable, ValueError, IndexError) as error:
        raise _refused(str(error)) from error
    # What is before a user's message wherever it stands; ends that all messages share are no part of it.
    user_head = _common_end(_common_end(between, after), bare.partition(_USER)[0])
    if user_end:
        user_head = user_head.removeprefix(user_end)
    system_end, assistant_end = between.removesuffix(user_head), after.removesuffix(user_head)
    bos = renderer.tokenizer.bos_token or ""
    begin = bos if bos and head.startswith(bos) and not user_head.startswith(bos) else ""
    lead = bare.partition(_USER)[0].removesuffix(user_head).removeprefix(begin)
    system_head = head.removeprefix(begin)
    default = None
    if lead:
        if not (lead.startswith(system_head) and lead.endswith(system_end)):
            raise _refused("it writes something before the first message")
        default = lead[len(system_head) : len(lead) - len(system_end)]
    frames = Frames(
        begin,
        (system_head, system_end),
        (user_head, user_end),
        (opening.removeprefix(user_end), assistant_end),
        default,
    )
    for conversation in (
        [("user", "One?")],
        [
            ("system", "Be brief."),
            ("user", "One?"),
            ("assistant", "1"),
            ("user", "Two?"),
            ("assistant", "2"),
            ("user", "?"),
        ],
    ):
        messages = [{"role": role, "content": content} for role, content in conversation]
        if frames.write(conversation) != template.render(messages, generation=True):
            raise _refused("it changes with what stands in the messages")
    return frames


def _refused(reason: str) -> InputError:
    return InputError(
        f"the chat template cannot be written for Ollama ({reason}): export with --to gguf, which carries the "
        "template itself"
    )


def _common_end(first: str, second: str) -> str:
    size = 0
    while size < min(len(first), len(second)) and first[-1 - size] == second[-1 - size]:
        size += 1
    return first[len(first) - size :]


def write_modelfile(file: str, renderer: Renderer, adds_bos: bool, temperature: float | None = None) -> str:
    """The Modelfile for the GGUF file `file` beside it. `adds_bos`: the runtime puts the beginning-of-text token."""
    frames = read_frames(renderer)
    begin = "" if adds_bos else frames.begin
    texts = [begin, *frames.system, *frames.user, *frames.assistant, frames.default_system or ""]
    if any('"""' in text or "{{" in text for text in texts):
        raise _refused('it holds """ or {{')
    (s0, s1), (u0, u1), (a0, a1) = frames.system, frames.user, frames.assistant
    template = (
        f"{begin}{{{{ range $i, $m := .Messages }}}}"
        f'{{{{ if eq $m.Role "system" }}}}{s0}{{{{ $m.Content }}}}{s1}'
        f'{{{{ else if eq $m.Role "user" }}}}{u0}{{{{ $m.Content }}}}{u1}'
        f'{{{{ else if eq $m.Role "assistant" }}}}{a0}{{{{ $m.Content }}}}{a1}'
        f"{{{{ end }}}}{{{{ end }}}}{a0}"
    )
    lines = [f"FROM ./{file}", f'TEMPLATE """{template}"""']
    if frames.default_system is not None:
        lines.append(f'SYSTEM """{frames.default_system}"""')
    decode = renderer.tokenizer.convert_ids_to_tokens
    lines += [f'PARAMETER stop "{stop}"' for stop in dict.fromkeys(map(decode, renderer.stop_tokens)) if stop]
    if temperature is not None:
        lines.append(f"PARAMETER temperature {temperature:g}")
    return "\n".join(lines) + "\n"
