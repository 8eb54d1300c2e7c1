"""A reward that any model earns a little of, and that tells completions apart: what GRPO benchmarks are run with.

Used by both sides: by instep as a reward file (`vowels.py:vowels`), by peers through `share_of_vowels`.
"""

from __future__ import annotations

from typing import Any


def share_of_vowels(text: str) -> float:
    return sum(letter in "aeiou" for letter in text) / (len(text) + 1)


def vowels(
    prompts: list[str], completions: list[str], messages: list[Any], columns: dict[str, Any]
) -> list[float]:
    return [share_of_vowels(text) for text in completions]
