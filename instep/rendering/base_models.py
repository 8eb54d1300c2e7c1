"""Chat templates for base models, whose tokenizers have none: that of the family's instruction-tuned models.

Only where the vocabulary holds the tokens that the template frames turns with, as it does for the families named
here: their base and their instruction-tuned models share one tokenizer. What a turn looks like is still new to the
base model, and training has to teach it.
"""

from __future__ import annotations

from typing import Any

_GEMMA = """{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set prefix = messages[0].content + '\\n\\n' %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set prefix = '' %}
    {%- set turns = messages %}
{%- endif %}
{%- for message in turns %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
    {{- (prefix if loop.first else '') + message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"""
"""Gemma 3's, for text: the system prompt stands before the first user message."""

TEMPLATES: dict[str, tuple[tuple[str, ...], str]] = {
    "Gemma 3": (("<bos>", "<start_of_turn>", "<end_of_turn>"), _GEMMA),
}
"""Family → the tokens that its template frames turns with, and the template."""


def lend_template(tokenizer: Any) -> None:
    """Give the tokenizer its family's template where it has none; leave it as it is where no family fits."""
    if tokenizer.chat_template:
        return
    special = set(tokenizer.all_special_tokens) | {
        token.content for token in tokenizer.added_tokens_decoder.values() if token.special
    }
    for tokens, template in TEMPLATES.values():
        if special.issuperset(tokens):
            tokenizer.chat_template = template
            return


def lender(tokenizer: Any) -> str | None:
    """The family whose template was lent to the tokenizer; None where it has one of its own."""
    return next((name for name, (_, text) in TEMPLATES.items() if tokenizer.chat_template == text), None)


def describe_loan(tokenizer: Any) -> dict[str, str]:
    """For the choices that are told: whose chat template is used, where it is not the tokenizer's own."""
    name = lender(tokenizer)
    return {"chat template": f"{name}'s: a base model has none of its own"} if name else {}
