"""Chat templates written for these tests, each with the behaviour of one family, and tiny tokenizers for them.

SmolLM2's is the stock text (Hugging Face, Apache-2.0). The others are our own, and reproduce what matters of the
family: roles and control tokens, tools, white space, alternation, thinking, what is dropped.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_QWEN_HEAD = """
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {{- messages[0].content + '\n\n' if messages[0].role == 'system' else default_system }}
    {{- '# Tools\n\nFunction signatures:\n<tools>' }}
    {%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\n</tools>\n\nCalls go within <tool_call></tool_call>.<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- elif default_system %}
    {{- '<|im_start|>system\n' + default_system + '<|im_end|>\n' }}
{%- endif %}"""
_QWEN_CALLS = """
            {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\n</tool_call>' }}"""
_QWEN_TOOL = """
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"""

QWEN25 = (
    "{%- set default_system = 'You are a default assistant.' %}"
    + _QWEN_HEAD
    + """
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) or
           (message.role == 'assistant' and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{- '\n' + message.content }}{%- endif %}
        {%- for call in message.tool_calls %}{{- '\n' }}"""
    + _QWEN_CALLS
    + "{%- endfor %}{{- '<|im_end|>\n' }}"
    + _QWEN_TOOL
    + "{%- endif %}"
)

QWEN3 = (
    "{%- set default_system = '' %}"
    + _QWEN_HEAD
    + """
{%- set ns = namespace(looking=true, last_query=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- if ns.looking and message.role == 'user' and not message.content.startswith('<tool_response>') %}
        {%- set ns.looking = false %}{%- set ns.last_query = messages | length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content %}{%- set thought = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last_query and (loop.last or thought) %}
            {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if content or not loop.first %}{{- '\n' }}{%- endif %}"""
    + _QWEN_CALLS
    + "{%- endfor %}{{- '<|im_end|>\n' }}"
    + _QWEN_TOOL
    + """
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}"""
)

LLAMA32 = """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now('%d %b %Y') %}{%- endif %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\nToday Date: ' + date_string + '\n\n' }}
{{- system + '<|eot_id|>' }}
{%- if tools %}
    {%- set first = messages[0].content | trim %}{%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\n\nGiven these functions, answer with JSON.\n\n' }}
    {%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- '\n\n' }}{%- endfor %}
    {{- first + '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role in ('tool', 'ipython') %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}{{- message.content | tojson }}{{- '<|eot_id|>' }}
    {%- elif message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception('only single tool-calls at once!') }}{%- endif %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + message.tool_calls[0].function.name }}
        {{- '", "parameters": ' }}{{- message.tool_calls[0].function.arguments | tojson }}{{- '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""

_GEMMA_LOOP = """
{%- for message in loop_messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' }}
    {{- (prefix if loop.first else '') + message.content | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{%- endif %}"""
GEMMA2 = (
    """{{- bos_token }}
{%- if messages[0].role == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}
{%- set loop_messages = messages %}{%- set prefix = '' %}"""
    + _GEMMA_LOOP
)
GEMMA3 = (
    """{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set prefix = messages[0].content + '\n\n' %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set prefix = '' %}{%- set loop_messages = messages %}{%- endif %}"""
    + _GEMMA_LOOP
)

PHI4_MINI = """{%- for message in messages %}
    {%- if message.role == 'system' and message.tools %}
        {{- '<|system|>' + message.content + '<|tool|>' + message.tools + '<|/tool|><|end|>' }}
    {%- else %}{{- '<|' + message.role + '|>' + message.content + '<|end|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- else %}{{- eos_token }}{%- endif %}"""

MISTRAL = """{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- set users = loop_messages | selectattr('role', 'equalto', 'user') | list %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
        {%- if (message.role == 'user') != (ns.index % 2 == 0) %}
            {{- raise_exception('After the optional system message, conversation roles must alternate') }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{%- for message in loop_messages %}
    {%- if message.role == 'user' %}
        {%- if tools and message == users[-1] %}
            {{- '[AVAILABLE_TOOLS] ' }}{{- tools | tojson }}{{- '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {%- if loop.last and system is defined %}{{- '[INST] ' + system + '\n\n' + message.content + '[/INST]' }}
        {%- else %}{{- '[INST] ' + message.content + '[/INST]' }}{%- endif %}
    {%- elif message.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{- raise_exception('Tool call IDs have length 9!') }}{%- endif %}
            {{- '{"name": "' + call.function.name + '", "arguments": ' }}{{- call.function.arguments | tojson }}
            {{- ', "id": "' + call.id + '"}' }}
            {%- if not loop.last %}{{- ', ' }}{%- endif %}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif message.role == 'assistant' %}{{- ' ' + message.content + eos_token }}
    {%- elif message.role == 'tool' %}
        {%- if message.tool_call_id | length != 9 %}{{- raise_exception('Tool call IDs have length 9!') }}{%- endif %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | string + ', "call_id": "' }}
        {{- message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}"""

R1_DISTILL = """{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}{{- message.content }}
    {%- elif message.role == 'user' %}{{- '<|User|>' + message.content }}
    {%- elif message.role == 'assistant' %}
        {{- '<|Assistant|>' + message.content.split('</think>')[-1] + '<|end_of_sentence|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|Assistant|><think>\n' }}{%- endif %}"""


@dataclass(frozen=True)
class Family:
    template: str
    special: tuple[str, ...]
    added: tuple[str, ...] = ()
    """Added tokens that are not special."""
    bos: str | None = None
    eos: str | None = None
    sentencepiece: bool = False
    rstrip: tuple[str, ...] = ()


_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_QWEN_ADDED = ("<tool_call>", "</tool_call>")
FAMILIES = {
    "smollm2": Family(SMOLLM2, _CHATML, bos="<|im_start|>", eos="<|im_end|>"),
    "qwen2.5": Family(QWEN25, _CHATML, _QWEN_ADDED, eos="<|im_end|>"),
    "qwen3": Family(
        QWEN3,
        _CHATML,
        (*_QWEN_ADDED, "<think>", "</think>", "<tool_response>", "</tool_response>"),
        eos="<|im_end|>",
    ),
    "llama3.2": Family(
        LLAMA32,
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        bos="<|begin_of_text|>",
        eos="<|eot_id|>",
    ),
    "gemma2": Family(
        GEMMA2,
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        bos="<bos>",
        eos="<eos>",
        sentencepiece=True,
    ),
    "gemma3": Family(
        GEMMA3,
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        bos="<bos>",
        eos="<eos>",
        sentencepiece=True,
    ),
    "phi4-mini": Family(
        PHI4_MINI,
        ("<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"),
        ("<|tool|>", "<|/tool|>"),
        eos="<|endoftext|>",
        rstrip=("<|end|>", "<|user|>", "<|assistant|>", "<|system|>"),
    ),
    "mistral": Family(
        MISTRAL,
        (
            *("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
            *("[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        ),
        bos="<s>",
        eos="</s>",
        sentencepiece=True,
    ),
    "r1-distill": Family(
        R1_DISTILL,
        ("<|begin_of_sentence|>", "<|end_of_sentence|>", "<|User|>", "<|Assistant|>"),
        ("<think>", "</think>"),
        bos="<|begin_of_sentence|>",
        eos="<|end_of_sentence|>",
    ),
}

_CORPUS = [
    "The quick brown fox reads the file and then runs the tests.\n\n" * 3,
    'def main():\n    return {"name": "read", "arguments": {"path": "src/app.py"}}\n\n\n',
    "assistant\n\nuser\nsystem\ntool_call tool_response im_start im_end think  \n \n",
]


_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@cache
def tokenizer_of(name: str) -> Any:
    family = FAMILIES[name]
    return make_tokenizer(family)


def make_tokenizer(family: Family) -> Any:
    """A tokenizer of about 400 tokens with the family's added tokens and template."""
    added = [
        AddedToken(text, special=True, normalized=False, rstrip=text in family.rstrip)
        for text in family.special
    ]
    added += [AddedToken(text, special=False, normalized=False) for text in family.added]
    backend = Tokenizer(
        models.BPE(byte_fallback=family.sentencepiece, unk_token="<unk>" if family.sentencepiece else None)
    )
    if family.sentencepiece:
        first = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        backend.pre_tokenizer = first
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 0, 0)]
        )
        extra = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
        trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=extra, show_progress=False)
    else:
        backend.normalizer = normalizers.NFC()
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        if family.template is not SMOLLM2:  # newer tokenizers keep runs of line ends together
            words = pre_tokenizers.Split(Regex(_WORDS), "isolated")
            backend.pre_tokenizer = pre_tokenizers.Sequence(
                [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
            )
        backend.decoder = decoders.ByteLevel()
        backend.post_processor = processors.ByteLevel(trim_offsets=True)
        trainer = trainers.BpeTrainer(
            vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        )
    backend.train_from_iterator(_CORPUS, trainer)
    state = json.loads(backend.to_str())
    state["added_tokens"] = []  # the trainer makes its byte tokens special; published tokenizers do not
    backend = Tokenizer.from_str(json.dumps(state))
    backend.add_tokens(added)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=family.bos,
        eos_token=family.eos,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = family.template
    return tokenizer
