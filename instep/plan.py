"""What a training step needs, estimated from `config.json` alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LONGEST_BY_CHOICE = 4096
"""Above this, attention costs more than the extra context brings; a longer row is taken only when asked for."""
MEMORY_SHARE = 0.6
"""Share of the free memory that one step's activations may be planned to take."""


def activation_bytes_per_token(
    config: Mapping[str, Any], checkpointing: bool, bytes_per_value: int = 2
) -> int:
    """Activations kept for the backward pass, per token of a row, without attention probabilities."""
    hidden, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
    inner = int(config.get("intermediate_size") or 4 * hidden)
    per_layer = 10 * hidden + 3 * inner
    kept = layers * hidden + per_layer * 2 if checkpointing else layers * per_layer
    return kept * bytes_per_value


def choose_row_length(
    config: Mapping[str, Any],
    longest: int,
    context: int,
    available_bytes: int,
    rows: int,
    checkpointing: bool,
) -> tuple[int, str]:
    """Row length in tokens and the reason: the shortest of what the data, the model, the memory and
    `LONGEST_BY_CHOICE` allow."""
    room = int(MEMORY_SHARE * available_bytes / (rows * activation_bytes_per_token(config, checkpointing)))
    limits = {
        "the longest conversation": -(-max(longest, 64) // 64) * 64,
        "the model's context": context,
        "the memory that is free": max(256, room // 64 * 64),
        "longer rows cost more in attention; set rendering.max_length for more": LONGEST_BY_CHOICE,
    }
    reason = min(limits, key=lambda name: limits[name])
    return limits[reason], f"{limits[reason]}: {reason}"
