from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from instep.config import BuildSettings
from instep.records import Conversation, Message
from instep.sessions import ReadReport, build

FIXTURES = Path(__file__).parent / "fixtures"
SHARED = Path(__file__).parents[2] / "../shared/data/sessions"


@pytest.fixture
def fixtures() -> Path:
    return FIXTURES


@pytest.fixture
def shared_sessions() -> Path:
    if not SHARED.is_dir():
        pytest.skip("the real sessions lie beside a developer's checkout only")
    return SHARED


@pytest.fixture
def read() -> Callable[..., tuple[list[Conversation], ReadReport]]:
    """Build from one fixture, or from a path, with settings."""

    def _read(*sources: str | Path, **settings: Any) -> tuple[list[Conversation], ReadReport]:
        paths = [FIXTURES / source if isinstance(source, str) else source for source in sources]
        return build(paths, BuildSettings(**settings))

    return _read


@pytest.fixture
def outline() -> Callable[[Conversation], list[str]]:
    """One short line a message: role, `*` where supervised, content, `+calls`."""

    def _line(message: Message) -> str:
        calls = "".join(f" +{call.name}" for call in message.tool_calls)
        return f"{message.role}{'*' if message.supervised else ''}: {message.content}{calls}"

    def _outline(conversation: Conversation) -> list[str]:
        return [_line(message) for message in conversation.messages]

    return _outline


@pytest.fixture
def assert_account() -> Callable[[Sequence[Conversation], ReadReport, int], None]:
    """Every assistant turn read is supervised, or counted once among the reasons."""

    def _assert(conversations: Sequence[Conversation], report: ReadReport, turns: int) -> None:
        supervised = sum(m.supervised for c in conversations for m in c.messages)
        assert report.supervised_turns == supervised
        assert supervised + sum(report.not_supervised.values()) == turns

    return _assert
