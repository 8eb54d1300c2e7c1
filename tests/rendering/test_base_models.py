"""A base model's tokenizer gets the chat template of its family, and only where the family's tokens are there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from families import FAMILIES, tokenizer_of

from instep.errors import InputError
from instep.records import Conversation, Message
from instep.rendering.base_models import describe_loan, lender
from instep.rendering.template import Renderer
from instep.rendering.tokenizer import load_tokenizer, write_lent_template


def base_model(folder: Path, family: str) -> Path:
    tokenizer_of(family).save_pretrained(folder)
    (folder / "chat_template.jinja").unlink()
    return folder


def test_a_gemma_base_model_reads_turns_as_its_tuned_sibling_does(tmp_path: Path) -> None:
    lent, own = load_tokenizer(base_model(tmp_path, "gemma3")), tokenizer_of("gemma3")
    assert "Gemma 3" in describe_loan(lent)["chat template"] and not describe_loan(own)
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " hello "},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "more"},
    ]
    for prompt in (True, False):
        texts = [
            one.apply_chat_template(
                messages[: 4 - (not prompt)], tokenize=False, add_generation_prompt=prompt
            )
            for one in (lent, own)
        ]
        assert texts[0] == texts[1] and "<start_of_turn>" in texts[0]
    conversation = Conversation("c", (Message("user", "hello"), Message("assistant", "Hi.", supervised=True)))
    (rendered,) = Renderer(lent).render(conversation)
    supervised = lent.decode(rendered.tokens[rendered.weight > 0].tolist())
    assert supervised == "Hi.<end_of_turn>"


def test_other_vocabularies_are_lent_nothing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no chat template"):
        load_tokenizer(base_model(tmp_path, "llama3.2"))


def test_a_model_made_from_a_base_model_keeps_the_template(tmp_path: Path) -> None:
    base, target, tuned = tmp_path / "base", tmp_path / "target", tmp_path / "tuned"
    for folder in (base, target, tuned):
        folder.mkdir()
    write_lent_template(base_model(base, "gemma3"), base_model(target, "gemma3"))
    from transformers import AutoTokenizer

    assert lender(AutoTokenizer.from_pretrained(str(target))) == "Gemma 3"
    tokenizer_of("gemma3").save_pretrained(base)  # a template of its own: nothing to hand on
    write_lent_template(base, tuned)
    assert not list(tuned.iterdir())
    assert load_tokenizer(base).chat_template == FAMILIES["gemma3"].template
