"""Fixtures that several folders of tests use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from instep.config import DEFAULT_MODEL
from instep.errors import InputError
from instep.models import resolve

# Tests run side by side on tiny models: threads of one would only wait for those of another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Programs for tiny models run once: XLA takes twice as long to optimise them.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
# One worker compiles, the others (and the next run) read.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# Only the tests of trackers have their runs tracked.
os.environ.setdefault("INSTEP_TRACKER", "none")


@pytest.fixture(scope="session")
def smol() -> Path:
    """Folder of the real SmolLM2-135M-Instruct; skips where neither Hub, cache nor PyPI has it."""
    try:
        return resolve(DEFAULT_MODEL)
    except InputError as error:
        if "can be reached" in str(error) or "cannot be reached" in str(error):
            pytest.skip(f"no model: {error}")
        raise


TINY_TEMPLATE = (
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
    tokenizer.chat_template = TINY_TEMPLATE
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
def trained_run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of three steps on the tiny model, at a rate that changes what it says."""
    import json

    from instep.config import SftSettings
    from instep.loops.sft_run import run_sft
    from instep.settings_file import load_settings
    from tests.loops.collector import Collector

    folder = tmp_path_factory.mktemp("trained")
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"Count to {number} and tell me about file {number}."},
                {"role": "assistant", "content": f"the file {number} has {number * 31} words"},
            ]
        }
        for number in range(3, 15)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = load_settings(
        SftSettings,
        overrides=[
            "max_steps=3",
            "optimizer.learning_rate=0.05",
            "model.precision=float32",
            "adapter.rank=4",
        ],
        flags={
            "engine": "torch",
            "model.path": str(tiny_model),
            "data.path": str(folder / "chats.jsonl"),
            "run.folder": str(folder / "run"),
        },
    )
    assert run_sft(settings, Collector())["finished"]
    return folder / "run"
