"""The real session of several hundred turns, with SmolLM2's own tokenizer. Both are skipped where absent."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conversations import decoded, inline_said

from instep.errors import InputError
from instep.records import Conversation
from instep.rendering.template import Rendered, Renderer
from instep.rendering.tokenizer import load_tokenizer
from instep.rendering.windows import windows

SESSION = Path(__file__).parents[2] / "../shared/data/sessions/pi/large-session.jsonl"
pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    from instep.config import DEFAULT_MODEL
    from instep.models import resolve

    try:
        return Renderer(load_tokenizer(resolve(DEFAULT_MODEL)))
    except InputError as error:
        pytest.skip(f"the model is not here: {error}")


@pytest.fixture(scope="module")
def conversation() -> Conversation:
    if not SESSION.is_file():
        pytest.skip("the shared session file is not here")
    import instep.sessions

    conversations, _ = instep.sessions.load(SESSION)
    return max(conversations, key=lambda one: len(one.messages))


@pytest.fixture(scope="module")
def rendered(renderer: Renderer, conversation: Conversation) -> Rendered:
    started = time.perf_counter()
    renderings = renderer.render(conversation)
    assert time.perf_counter() - started < 10
    assert len(renderings) == 1
    return renderings[0]


def test_each_turn_decodes_to_what_was_said(
    renderer: Renderer, conversation: Conversation, rendered: Rendered
) -> None:
    turns = 0
    for index, message in enumerate(conversation.messages):
        mine = rendered.tokens[(rendered.weight > 0) & (rendered.message == index)]
        if not message.supervised or not (message.content or message.tool_calls):
            assert len(mine) == 0
            continue
        assert decoded(renderer.tokenizer, mine) == inline_said(message, "<|im_end|>")
        turns += 1
    assert turns > 400


def test_windows_drop_no_turn_and_repeat_little(rendered: Rendered) -> None:
    samples = windows(rendered, 4096, 1024)
    processed = sum(map(len, samples))
    supervised = int((rendered.weight > 0).sum())
    assert sum(int((sample.weight > 0).sum()) for sample in samples) == supervised
    assert {turn for sample in samples for turn in sample.turns} == set(
        np.unique(rendered.message[rendered.weight > 0]).tolist()
    )
    assert max(map(len, samples)) <= 4096
    assert processed / supervised <= 2.6


def test_prompts_of_the_session_are_prefixes(
    renderer: Renderer, conversation: Conversation, rendered: Rendered
) -> None:
    for index in [index for index, message in enumerate(conversation.messages) if message.supervised][::120]:
        prompt: Any = renderer.prompt(conversation.messages[:index], conversation.tools)
        assert rendered.tokens[: len(prompt)].tolist() == prompt.tolist()
