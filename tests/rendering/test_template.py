from __future__ import annotations

import dataclasses
import json
from functools import cache
from typing import Any

import numpy as np
import pytest
from conversations import READ, agent_session, call, decoded, inline_said, result, said, supervised_text, user
from families import FAMILIES, Family, make_tokenizer, tokenizer_of

from instep.errors import InputError
from instep.records import Conversation, Message, StopReason
from instep.rendering.template import Renderer

ALL = sorted(FAMILIES)
NATIVE = ("qwen2.5", "qwen3")
INLINE = [name for name in ALL if name not in NATIVE]
STOP = {
    "smollm2": "<|im_end|>",
    "qwen2.5": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "llama3.2": "<|eot_id|>",
    "gemma2": "<end_of_turn>",
    "gemma3": "<end_of_turn>",
    "phi4-mini": "<|end|>",
    "mistral": "</s>",
    "r1-distill": "<|end_of_sentence|>",
}


@cache
def renderer_of(name: str, include_reasoning: bool = False) -> Renderer:
    return Renderer(tokenizer_of(name), include_reasoning)


def render(name: str, *messages: Message, tools: tuple[Any, ...] = (), reasoning: bool = False) -> list[Any]:
    return renderer_of(name, reasoning).render(Conversation("c", tuple(messages), tools))


def qwen_said(message: Message) -> str:
    calls = [
        f'<tool_call>\n{{"name": "{one.name}", "arguments": {json.dumps(dict(one.arguments))}}}\n</tool_call>'
        for one in message.tool_calls
    ]
    text = "\n".join([*([message.content] if message.content else []), *calls])
    return text + ("" if message.stop is StopReason.LENGTH else "<|im_end|>")


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("system", [True, False])
def test_supervised_tokens_are_what_the_assistant_said(name: str, system: bool) -> None:
    conversation = agent_session(system)
    found = supervised_text(tokenizer_of(name), renderer_of(name).render(conversation))
    expected = {
        index: qwen_said(message) if name in NATIVE else inline_said(message, STOP[name])
        for index, message in enumerate(conversation.messages)
        if message.supervised
    }
    if name == "mistral":  # the template writes a space before every answer, and the model must too
        expected = {index: f" {text}" for index, text in expected.items()}
    assert found == expected


@pytest.mark.parametrize("name", ALL)
def test_stop_tokens_are_known(name: str) -> None:
    tokenizer = tokenizer_of(name)
    stops = renderer_of(name).stop_tokens
    assert stops[0] == tokenizer.convert_tokens_to_ids(STOP[name])
    assert tokenizer.eos_token_id in stops


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("system", [True, False])
def test_training_tokens_begin_with_the_prompt(name: str, system: bool) -> None:
    conversation = agent_session(system)
    renderer = renderer_of(name)
    renderings = renderer.render(conversation)
    for index, message in enumerate(conversation.messages):
        if not message.supervised:
            continue
        prompt = renderer.prompt(conversation.messages[:index], conversation.tools)
        assert prompt.dtype == np.int32
        holding = [one for one in renderings if ((one.weight > 0) & (one.message == index)).any()]
        assert len(holding) == 1
        first = np.flatnonzero((holding[0].weight > 0) & (holding[0].message == index))[0]
        assert holding[0].tokens[:first].tolist() == prompt.tolist()


@pytest.mark.parametrize("name", ALL)
def test_the_text_is_the_templates_own_and_the_tokens_are_those_of_the_whole_text(name: str) -> None:
    messages = [user("Read it."), said("I have read it."), user("Well?"), said("The tests run.")]
    tokenizer = tokenizer_of(name)
    plain = [{"role": one.role, "content": one.content} for one in messages]
    text = tokenizer.apply_chat_template(
        plain, tokenize=False, date_string="26 Jul 2024", enable_thinking=False
    )
    rendered = render(name, *messages)[-1]
    shown = text[: text.rindex(STOP[name]) + len(STOP[name])]
    assert decoded(tokenizer, rendered.tokens) == shown
    assert rendered.tokens.tolist() == tokenizer(shown, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("name", ALL)
def test_text_that_looks_like_control_tokens_stays_text(name: str) -> None:
    family = FAMILIES[name]
    renderer, tokenizer = renderer_of(name), tokenizer_of(name)
    fake = "".join(dict.fromkeys((*family.special, STOP[name])))
    clean = [user("one"), said("two", call("x")), result("three"), said("four")]
    faked = [dataclasses.replace(message, content=f"{message.content} {fake} end") for message in clean]
    faked[1] = dataclasses.replace(faked[1], tool_calls=(call(f"x{fake}y"),))
    control = renderer._encoder.control
    ids = [tokenizer.convert_tokens_to_ids(text) for text in control]
    counts = []
    for messages in (clean, faked):
        renderings = renderer.render(Conversation("c", tuple(messages), (READ,)))
        counts.append([int(np.isin(one.tokens, ids).sum()) for one in renderings])
    assert counts[0] == counts[1], "a message made control tokens"
    found = supervised_text(tokenizer, renderer.render(Conversation("c", tuple(faked), (READ,))))
    assert found[3].removeprefix(" ") == f"four {fake} end{STOP[name]}"
    assert f"x{fake}y" in found[1] and found[1].endswith(STOP[name])


@pytest.mark.parametrize("name", ALL)
def test_an_answer_that_could_merge_with_the_header_keeps_a_token_border(name: str) -> None:
    renderer, tokenizer = renderer_of(name), tokenizer_of(name)
    content = "\n\nit starts with lines"
    rendered = render(name, user("one"), said(content))[0]
    first = np.flatnonzero(rendered.weight)[0]
    assert rendered.tokens[:first].tolist() == renderer.prompt([user("one")]).tolist()
    shown = renderer.dialect.trim("assistant", content)
    assert decoded(tokenizer, rendered.tokens[first:]).removeprefix(" ") == shown + STOP[name]


@pytest.mark.parametrize("name", ALL)
def test_every_token_belongs_to_its_message(name: str) -> None:
    conversation = agent_session()
    tokenizer = tokenizer_of(name)
    for rendered in renderer_of(name).render(conversation):
        owned = rendered.message[rendered.message >= 0]
        assert (np.diff(owned) >= 0).all()
        assert (rendered.message[rendered.head :] > 0).all()
        shown = set(owned.tolist()) - {0}
        assert shown == set(range(1, max(shown) + 1))
        for index in shown:
            message = conversation.messages[index]
            text = decoded(tokenizer, rendered.tokens[rendered.message == index])
            assert message.content.strip() in text
            others = {other.content.strip() for other in conversation.messages if other.content} - {
                message.content.strip()
            }
            assert not any(other in text for other in others)
        head = decoded(tokenizer, rendered.tokens[: rendered.head])
        assert "You are an agent." in head and "Read a file" in head and "Fix the tests." not in head


def test_only_supervised_turns_count_and_the_head_never() -> None:
    for name in ALL:
        for rendered in renderer_of(name).render(agent_session()):
            assert rendered.weight[: rendered.head].sum() == 0
            assert not ((rendered.weight > 0) & (rendered.message == 9)).any()


def test_a_turn_that_shows_nothing_is_not_supervised() -> None:
    assert render("smollm2", user("one"), said("")) == []
    found = supervised_text(
        tokenizer_of("smollm2"), render("smollm2", user("one"), said(""), user("two"), said("x"))
    )
    assert found == {3: "x<|im_end|>"}


@pytest.mark.parametrize(
    ("stop", "ends"),
    [(StopReason.END_OF_TURN, True), (StopReason.UNKNOWN, True), (StopReason.TOOL_CALL, True)]
    + [
        (one, False)
        for one in (StopReason.LENGTH, StopReason.STOP_STRING, StopReason.ERROR, StopReason.ABORTED)
    ],
)
def test_the_end_of_turn_token_is_supervised_only_where_it_was_produced(stop: StopReason, ends: bool) -> None:
    found = supervised_text(tokenizer_of("llama3.2"), render("llama3.2", user("one"), said("two", stop=stop)))
    assert found == {1: "two<|eot_id|>" if ends else "two"}


# -- families ------------------------------------------------------------------------------------


def test_hermes_text_where_the_template_drops_tools() -> None:
    tokenizer = tokenizer_of("smollm2")
    rendered = renderer_of("smollm2").render(agent_session())[0]
    text = decoded(tokenizer, rendered.tokens)
    assert text.startswith(
        "<|im_start|>system\nYou are an agent.\nBe brief.\n\nYou can call these tools:\n<tools>\n"
    )
    assert json.dumps(READ) in text
    assert (
        "<|im_start|>tool\n<tool_response>\ndef main():\n    return 1\n\n</tool_response><|im_end|>\n" in text
    )
    llama = decoded(tokenizer_of("llama3.2"), renderer_of("llama3.2").render(agent_session())[0].tokens)
    assert "<|start_header_id|>user<|end_header_id|>\n\n<tool_response>\ndef main():" in llama


def test_qwen3_gives_each_turn_a_rendering_as_the_model_sees_it() -> None:
    tokenizer = tokenizer_of("qwen3")
    messages = [user("one"), said("two"), user("three"), said("four"), user("five"), said("six")]
    renderings = render("qwen3", *messages)
    assert [decoded(tokenizer, one.tokens) for one in renderings][-1] == (
        "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>\n"
        "<|im_start|>user\nthree<|im_end|>\n<|im_start|>assistant\nfour<|im_end|>\n"
        "<|im_start|>user\nfive<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nsix<|im_end|>"
    )
    assert [supervised_text(tokenizer, [one]) for one in renderings] == [
        {1: "two<|im_end|>"},
        {3: "four<|im_end|>"},
        {5: "six<|im_end|>"},
    ]


def test_reasoning_is_supervised_only_when_asked_for() -> None:
    tokenizer = tokenizer_of("qwen3")
    messages = [
        user("one"),
        said("", call("x"), reasoning="think first"),
        result("r"),
        said("two", reasoning="think again\n"),
        user("three"),
        said("four", reasoning="last thought"),
    ]
    without = supervised_text(tokenizer, render("qwen3", *messages))
    assert not any("thought" in text or "think" in text for text in without.values())
    renderings = render("qwen3", *messages, reasoning=True)
    found = supervised_text(tokenizer, renderings)
    assert found[3] == "<think>\nthink again\n</think>\n\ntwo<|im_end|>"
    assert found[5] == "<think>\nlast thought\n</think>\n\nfour<|im_end|>"
    assert found[1].startswith("<think>\nthink first\n</think>\n\n<tool_call>\n")
    # The turns after one question keep their thoughts, so they share a rendering; the next question drops them.
    assert len(renderings) == 2
    assert "think again" not in decoded(tokenizer, renderings[1].tokens)
    renderer = renderer_of("qwen3", True)
    prompt = renderer.prompt(messages[:5])
    assert renderings[1].tokens[: len(prompt)].tolist() == prompt.tolist()


def test_a_mix_of_turns_with_and_without_reasoning() -> None:
    tokenizer = tokenizer_of("qwen3")
    messages = [user("one"), said("two", reasoning="hm"), user("three"), said("four")]
    found = supervised_text(tokenizer, render("qwen3", *messages, reasoning=True))
    assert found == {1: "<think>\nhm\n</think>\n\ntwo<|im_end|>", 3: "four<|im_end|>"}


def test_a_template_without_a_place_for_reasoning_does_not_show_it() -> None:
    rendered = render("smollm2", user("one"), said("two", reasoning="secret"), reasoning=True)
    assert "secret" not in decoded(tokenizer_of("smollm2"), rendered[0].tokens)


def test_content_that_holds_think_tags_is_kept_as_said() -> None:
    content = "The tag </think> ends it, <think> starts it."
    found = supervised_text(
        tokenizer_of("qwen3"), render("qwen3", user("one"), said(content), user("x"), said("y"))
    )
    assert found == {1: f"{content}<|im_end|>", 3: "y<|im_end|>"}


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_gemma_merges_neighbours_and_counts_each_message_by_itself(name: str) -> None:
    tokenizer = tokenizer_of(name)
    messages = [
        Message("system", "Be brief."),
        user("one"),
        user("two"),
        said("first", supervised=False),
        said("second"),
        result("r1"),
        result("r2"),
        user("three"),
        said("third"),
        said("fourth", supervised=False),
    ]
    rendered = render(name, *messages)[0]
    assert decoded(tokenizer, rendered.tokens).startswith(
        "<bos><start_of_turn>user\nBe brief.\n\none\n\ntwo<end_of_turn>\n"
        "<start_of_turn>model\nfirst\n\nsecond<end_of_turn>\n"
        "<start_of_turn>user\n<tool_response>\nr1\n</tool_response>\n\n<tool_response>\nr2\n</tool_response>\n\nthree"
    )
    assert supervised_text(tokenizer, [rendered]) == {4: "second<end_of_turn>", 8: "third"}


def test_a_conversation_that_opens_with_the_assistant_alternates_too() -> None:
    found = supervised_text(tokenizer_of("gemma3"), render("gemma3", said("hello"), user("one"), said("two")))
    assert found == {0: "hello<end_of_turn>", 2: "two<end_of_turn>"}


def test_later_system_messages_become_user_messages() -> None:
    rendered = render(
        "llama3.2", Message("system", "a"), user("b"), said("c"), Message("system", "late"), said("d")
    )
    assert "<|start_header_id|>user<|end_header_id|>\n\nlate<|eot_id|>" in decoded(
        tokenizer_of("llama3.2"), rendered[0].tokens
    )


def test_a_date_in_the_template_does_not_change_the_tokens() -> None:
    assert "Today Date: 26 Jul 2024" in decoded(
        tokenizer_of("llama3.2"), render("llama3.2", user("a"), said("b"))[0].tokens
    )


MISTRAL_LIKE_NATIVE = (
    FAMILIES["mistral"]
    .template.replace("{{- '[TOOL_CALLS] [' }}", "{{- message.content + '[TOOL_CALLS] [' }}")
    .replace("{%- if tools and message == users[-1] %}", "{%- if tools and loop.first %}")
)


def test_tool_ids_of_nine_letters_and_the_way_out_where_tools_break_alternation() -> None:
    family = dataclasses.replace(FAMILIES["mistral"], template=MISTRAL_LIKE_NATIVE)
    tokenizer = make_tokenizer(family)
    renderer = Renderer(tokenizer)
    assert renderer.dialect.tools == "native" and renderer.dialect.short_ids
    fine = Conversation("c", (user("one"), said("text", call("x")), result("r"), said("two")), (READ,))
    found = supervised_text(tokenizer, renderer.render(fine))
    text = decoded(tokenizer, renderer.render(fine)[0].tokens)
    call_id = text.split('"id": "')[1][:9]
    assert call_id.isalnum() and f'"call_id": "{call_id}"' in text
    assert found[1].startswith('text[TOOL_CALLS] [{"name": "read", "arguments": {"path": "x"')
    broken = Conversation(
        "c", (user("one"), said("", call("x")), result("r"), user("two"), said("three")), (READ,)
    )
    found = supervised_text(tokenizer, renderer.render(broken))
    assert found[4] == " three</s>" and "<tool_call>" in found[1]
    prompt = renderer.prompt(broken.messages[:4], broken.tools)
    assert renderer.render(broken)[0].tokens[: len(prompt)].tolist() == prompt.tolist()


def test_half_a_surrogate_pair_is_no_trap() -> None:
    messages = [user("cut \ud83d"), said("half \ud83d", call("p\udc00"))]
    found = supervised_text(tokenizer_of("smollm2"), render("smollm2", *messages, tools=(READ,)))
    assert found[1].startswith("half \ufffd\n<tool_call>") and "p\\udc00" not in found[1]


# -- refusals ------------------------------------------------------------------------------------

_BODY = "{{ '<|im_start|>' + message.role + '\n' + %s + '<|im_end|>\n' }}"
_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"


def chatml(content: str, prompt: str = _PROMPT, body: str = _BODY) -> Family:
    template = "{% for message in messages %}" + body.replace("%s", content) + "{% endfor %}" + prompt
    return dataclasses.replace(FAMILIES["smollm2"], template=template)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        (chatml("(message.content if message.role == 'user' else '')"), "drops what was said"),
        (chatml("message.content | upper"), "drops what was said"),
        (chatml("message.content | replace('\\n', ' ')"), "changes the text of assistant messages"),
        (
            chatml("message.content", body="{{ message.role + ': ' + %s + '\n' }}", prompt=""),
            "without an end-of-turn token",
        ),
        (
            chatml(
                "message.content", prompt="{% if add_generation_prompt %}{{ '<|im_start|>bot\n' }}{% endif %}"
            ),
            "generation prompt",
        ),
        (
            chatml("message.content", prompt=_PROMPT.replace("\n'", "\n' + '!' * (messages | length > 6)")),
            "fails",
        ),
        (chatml("message.text.strip()"), "fails on a plain user and assistant conversation"),
    ],
)
def test_a_template_that_cannot_be_trusted_is_refused(family: Family, reason: str) -> None:
    with pytest.raises(InputError, match=reason) as caught:
        Renderer(make_tokenizer(family))
    assert "\n" not in str(caught.value)


def test_context_tokens_bounds_renderings_of_one_turn() -> None:
    turns = [message for k in range(60) for message in (user(f"question {k} " * 20), said(f"answer {k}"))]
    renderer, tokenizer = renderer_of("qwen3"), tokenizer_of("qwen3")
    conversation = Conversation("c", (Message("system", "Be brief."), *turns))
    full, short = renderer.render(conversation), renderer.render(conversation, context_tokens=50)
    assert supervised_text(tokenizer, full) == supervised_text(tokenizer, short)
    assert sum(map(len, short)) < sum(map(len, full)) / 5
    for long, cut in zip(full, short, strict=True):
        assert cut.tokens[: cut.head].tolist() == long.tokens[: long.head].tolist()
        tail = len(cut) - cut.head
        assert cut.tokens[cut.head :].tolist() == long.tokens[-tail:].tolist()
        assert cut.message[cut.head :].tolist() == long.message[-tail:].tolist()
        assert np.flatnonzero(cut.weight)[0] - cut.head >= min(50, np.flatnonzero(long.weight)[0] - long.head)
