"""A GGUF file made into a Hugging Face folder: bf16 safetensors, tokenizer, chat template; checked once.

Runs as a process of its own (`python -m instep.engines.torch.gguf JSON`, the arguments of `convert`), so
that the float copy of the weights is gone from memory when training starts. Prints one JSON object.
"""

from __future__ import annotations

import functools
import json
import math
import sys
from pathlib import Path
from typing import Any

ENGLISH = (
    "The library opens at nine in the morning and closes at six in the evening. Children can borrow up to "
    "five books at a time, and they may keep them for three weeks. If a book is lost, the family pays for a "
    "new copy."
)
"""A sound language model gives this a perplexity of about 10, a broken conversion one in the thousands."""


def convert(gguf: str, folder: str, max_perplexity: float, split_digits: bool) -> dict[str, Any]:
    """Dequantise the file `gguf` into `folder`, which exists. Returns parameters and perplexity.

    `split_digits`: the original tokenizer splits digits off before BPE. GGUF says so only by a name that
    the loader does not know: it splits as GPT-2 does. Raises ValueError where the perplexity of `ENGLISH`
    is not below `max_perplexity`: the conversion is wrong.
    """
    import gguf as gguf_package
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    # Config, tokenizer and weights each read the whole file anew, 50,000 Python objects at a time.
    gguf_package.GGUFReader = functools.cache(gguf_package.GGUFReader)
    source = {"pretrained_model_name_or_path": str(Path(gguf).parent), "gguf_file": Path(gguf).name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model: Any = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)

    config = model.config
    if split_digits:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    tokenizer.model_max_length = config.max_position_embeddings
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    config.pad_token_id = tokenizer.pad_token_id
    config.rms_norm_eps = _shortest_float(config.rms_norm_eps)
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )

    perplexity = _perplexity(model, tokenizer)
    if not perplexity < max_perplexity:
        raise ValueError(f"perplexity of plain English is {perplexity:.1f}, expected below {max_perplexity}")

    # save_pretrained refuses a model that still says it was loaded quantised.
    for name in ("hf_quantizer", "quantization_method"):
        if hasattr(model, name):
            delattr(model, name)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {"parameters": sum(p.numel() for p in model.parameters()), "perplexity": round(perplexity, 2)}


def _shortest_float(value: float) -> float:
    """GGUF keeps scalars in float32, which makes 1e-5 of the original read 9.999999747378752e-06."""
    return float(f"{value:.6g}")


def _perplexity(model: Any, tokenizer: Any) -> float:
    import torch

    ids = tokenizer(ENGLISH, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        loss = model(input_ids=ids, labels=ids).loss
    return math.exp(min(float(loss), 100.0))


if __name__ == "__main__":
    print(json.dumps(convert(**json.loads(sys.argv[1]))))
