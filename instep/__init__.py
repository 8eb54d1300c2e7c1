"""instep: post-train language models on the machine you own; one training step on three engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from instep.chat.model import ChatModel

__version__ = "0.1.0"


def load(target: str | Path | None = None, **settings: Any) -> ChatModel:
    """A model to talk to: `instep.load("runs/mine").chat("Hello").text`.

    target    run, adapter folder, model folder or Hub id; without it the default model
    settings  any of `instep.config.GenerationSettings`: engine, adapter, temperature, model={"precision": …}, …
    Raises `instep.errors.InputError`. Frameworks are imported here, not by `import instep`.
    """
    from instep.chat.model import load

    return load(target, **settings)
