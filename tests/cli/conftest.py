"""A tiny random model with a real tokenizer and chat template, and conversations to train it on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a two-layer random llama with a byte-level tokenizer of 300-odd tokens."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny-model")
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(["user assistant system the file count to ten and say what you did"], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|im_end|>", bos_token="<|endoftext|>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=2,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve short chats in the OpenAI form, in which the answer repeats the question's number."""
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"Count to {number} and then tell me about file {number}."},
                {
                    "role": "assistant",
                    "content": " ".join(map(str, range(1, number + 1))) + f" file {number}",
                },
                {
                    "role": "user",
                    "content": f"Now the same for {number + 1}, please, as chat {number * 7919}.",
                },
                {
                    "role": "assistant",
                    "content": " ".join(map(str, range(1, number + 2))) + f" done {number * 31}",
                },
            ]
        }
        for number in range(3, 15)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


Instep = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def instep(tmp_path: Path) -> Instep:
    """Run the installed command in a folder of its own: `instep("sft", "--data", …)`."""

    def run(*arguments: str | Path, check: int | None = 0, env: dict[str, str] | None = None):
        result = subprocess.run(
            [sys.executable, "-m", "instep", *map(str, arguments)],
            cwd=tmp_path,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **(env or {})},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        if check is not None:
            assert result.returncode == check, f"exit {result.returncode}\n{result.stdout}\n{result.stderr}"
        return result

    return run
