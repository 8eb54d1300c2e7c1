"""A byte-level BPE tokenizer as GGUF describes it: tokens, kinds, merges, and the name of how text is split."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from instep.errors import InputError

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""Kinds of tokens (`gguf.TokenType`)."""

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {
    _WORDS + r"\p{N}{1,3}" + _REST: "llama-bpe",
    _WORDS + r"\p{N}" + _REST: "qwen2",
}
"""Regular expression of the pre-tokenizer → the name that llama.cpp knows it by."""


@dataclass(frozen=True)
class GgufTokenizer:
    tokens: list[str]
    kinds: list[int]
    merges: list[str]
    split: str
    bos: int | None
    eos: int | None
    pad: int | None
    adds_bos: bool
    chat_template: str


def read_tokenizer(tokenizer: Any, folder: Path, vocabulary: int) -> GgufTokenizer:
    """The tokenizer of a model folder; `vocabulary` is the number of rows of the embedding.

    Raises InputError for one that is no byte-level BPE, or that splits text in a way GGUF has no name for.
    """
    file = folder / "tokenizer.json"
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        model = raw["model"]
        known: dict[str, int] = model["vocab"] if model["type"] == "BPE" else {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file} cannot be read as a tokenizer: {error}") from error
    if not known or model.get("byte_fallback"):
        raise InputError(
            f"{file}: GGUF export knows byte-level BPE tokenizers only, this one is of another kind"
        )
    tokens = [f"[PAD{index}]" for index in range(vocabulary)]
    kinds = [UNUSED] * vocabulary
    for text, index in known.items():
        tokens[index], kinds[index] = text, NORMAL
    for added in raw.get("added_tokens", []):
        if added["id"] >= vocabulary:
            raise InputError(
                f"{file}: token {added['content']!r} lies outside the model's {vocabulary} embeddings"
            )
        tokens[added["id"]] = added["content"]
        kinds[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    merges = [one if isinstance(one, str) else " ".join(one) for one in model["merges"]]
    bos = tokenizer.bos_token_id
    begins = tokenizer.encode("a")
    return GgufTokenizer(
        tokens,
        kinds,
        merges,
        split_name(raw.get("pre_tokenizer"), file),
        bos,
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
        bool(bos is not None and begins[:1] == [bos]),
        str(tokenizer.chat_template),
    )


def split_name(pre: Mapping[str, Any] | None, file: Path) -> str:
    """llama.cpp's name for a `pre_tokenizer` of tokenizer.json. Raises InputError where it has none."""
    steps = list((pre or {}).get("pretokenizers", [pre] if pre else []))
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"] and steps[0].get("use_regex", True):
        return "gpt-2"
    if (
        kinds == ["Digits", "ByteLevel"]
        and steps[0].get("individual_digits")
        and steps[1].get("use_regex", True)
    ):
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and not steps[1].get("use_regex", True):
        pattern = (steps[0].get("pattern") or {}).get("Regex")
        if pattern in SPLITS and steps[0].get("behavior") == "Isolated":
            return SPLITS[pattern]
    found = ", ".join(str(kind) for kind in kinds) or "none"
    raise InputError(
        f"{file}: its pre-tokenizer ({found}) is none that GGUF export knows (GPT-2, SmolLM, Llama 3, Qwen 2 and 3): "
        "use --to hf and llama.cpp's own converter"
    )
