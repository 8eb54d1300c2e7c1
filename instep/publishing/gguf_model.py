"""A Hugging Face folder of the llama family as one GGUF file, in float16 or float32. numpy only.

Names and keys are those of llama.cpp (through the `gguf` package). Its `llama` architecture rotates neighbouring
dimensions where transformers rotates the two halves, so that rows of the query and key projections are reordered.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from instep import models
from instep.errors import InputError
from instep.files import writing
from instep.publishing.gguf_tokenizer import GgufTokenizer, read_tokenizer
from instep.publishing.tensors import FLOATS, TensorFile

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
PRECISIONS = {"f16": np.float16, "f32": np.float32}


def write_gguf(model: Path, target: Path, tokenizer: Any, precision: str, name: str) -> int:
    """Write the model of folder `model` to the file `target`, which is renamed into place when it is whole.

    precision  of the matrices, f16 or f32; vectors (norms, biases) stay float32, as llama.cpp wants them
    Returns the file's bytes. Raises InputError for an architecture, rotary scaling or tokenizer that is not known,
    and for a value that float16 cannot hold.
    """
    gguf = _package()
    config = models.read_config(str(model))
    architecture = architecture_of(config)
    files = [TensorFile(path) for path in sorted(model.glob("*.safetensors"))]
    if "quantization_config" in config or any(
        entry.dtype not in FLOATS for file in files for entry in file.entries.values()
    ):
        raise InputError(f"model {model} is stored quantized: export the 16-bit original")
    rows = next(
        file.entries[n].shape[0] for file in files for n in file.entries if n.endswith("embed_tokens.weight")
    )
    words = read_tokenizer(tokenizer, model, rows)
    partial = target.with_name(f".{target.name}.partial")
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            writer = gguf.GGUFWriter(str(partial), architecture)
            _describe(writer, config, architecture, precision, name)
            _describe_words(writer, words)
            _tensors(gguf, writer, files, config, architecture, precision)
            writer.close()
            size = partial.stat().st_size
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
    return size


def _package() -> Any:
    try:
        import gguf
    except ImportError:
        raise InputError("GGUF export needs the package gguf: pip install 'instep[torch]' or gguf") from None
    return gguf


def architecture_of(config: Mapping[str, Any]) -> str:
    """llama.cpp's name for the model's architecture. Raises InputError where it is none of ARCHITECTURES."""
    found = (config.get("architectures") or ["none"])[0]
    if found not in ARCHITECTURES:
        raise InputError(
            f"GGUF export knows {', '.join(ARCHITECTURES)}, this model is {found}: use --to hf and llama.cpp's own "
            "converter"
        )
    return ARCHITECTURES[found]


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary parameters: transformers 5 has them in one place, older configurations in two."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope.setdefault("rope_theta", config.get("rope_theta", 10_000.0))
    rope.setdefault("rope_type", rope.get("type", "default"))
    if rope["rope_type"] not in ("default", "linear", "llama3"):
        raise InputError(f"GGUF export does not know rotary scaling {rope['rope_type']!r}: use --to hf")
    return rope


def _head(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _describe(writer: Any, config: Mapping[str, Any], architecture: str, precision: str, name: str) -> None:
    rope, head = _rope(config), _head(config)
    writer.add_name(name)
    writer.add_file_type({"f32": 0, "f16": 1}[precision])
    writer.add_context_length(models.context_length(config))
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config.get("num_key_value_heads") or config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    if architecture == "llama":
        writer.add_rope_dimension_count(head)
    if config.get("sliding_window") and config.get("use_sliding_window", architecture == "llama"):
        writer.add_sliding_window(config["sliding_window"])
    if rope["rope_type"] == "linear":
        writer.add_string(f"{architecture}.rope.scaling.type", "linear")
        writer.add_rope_scaling_factor(float(rope["factor"]))


def _describe_words(writer: Any, words: GgufTokenizer) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(words.split)
    writer.add_token_list(words.tokens)
    writer.add_token_types(words.kinds)
    writer.add_token_merges(words.merges)
    for add, token in (
        (writer.add_bos_token_id, words.bos),
        (writer.add_eos_token_id, words.eos),
        (writer.add_pad_token_id, words.pad),
    ):
        if token is not None:
            add(token)
    writer.add_add_bos_token(words.adds_bos)
    writer.add_add_eos_token(False)
    writer.add_chat_template(words.chat_template)


def rope_factors(config: Mapping[str, Any]) -> np.ndarray | None:
    """What Llama 3's scaling divides each frequency by, float32 [head / 2]; None without it.

    Long waves are slowed by `factor`, short ones kept, those between interpolated (Llama 3.1's reference code).
    """
    rope = _rope(config)
    if rope["rope_type"] != "llama3":
        return None
    frequency = 1.0 / float(rope["rope_theta"]) ** (np.arange(0, _head(config), 2) / _head(config))
    low, high, original = (
        float(rope[key])
        for key in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    turns = original * frequency / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1.0 / ((1.0 - smooth) / float(rope["factor"]) + smooth)).astype(np.float32)


def _tensors(
    gguf: Any,
    writer: Any,
    files: list[TensorFile],
    config: Mapping[str, Any],
    architecture: str,
    precision: str,
) -> None:
    """First what all tensors are, then their values, one at a time."""
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    tied = bool(config.get("tie_word_embeddings"))
    listed: list[tuple[TensorFile, str, type]] = []
    factors = rope_factors(config)
    if factors is not None:
        writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes)
    for file in files:
        for name, entry in file.entries.items():
            if name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight"):
                continue
            new = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if new is None:
                raise InputError(f"{file.path}: {name} has no place in GGUF's {architecture}")
            dtype = PRECISIONS[precision] if len(entry.shape) > 1 else np.float32
            size = int(np.prod(entry.shape)) * np.dtype(dtype).itemsize
            writer.add_tensor_info(new, entry.shape, np.dtype(dtype), size)
            listed.append((file, name, dtype))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    if factors is not None:
        writer.write_tensor_data(factors)
    for file, name, dtype in listed:
        value = reordered(file.float32(name), name, config) if architecture == "llama" else file.float32(name)
        with np.errstate(over="ignore"):
            stored = np.ascontiguousarray(value.astype(dtype))
        if not np.isfinite(stored).all():
            raise InputError(
                f"{file.path}: {name} holds values that float16 cannot: export with --precision f32"
            )
        writer.write_tensor_data(stored)


def reordered(value: np.ndarray, name: str, config: Mapping[str, Any]) -> np.ndarray:
    """Rows of a query or key projection (weight [heads·d, in] or bias), the halves of each head interleaved."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config.get("num_key_value_heads")}
    module = name.split(".")[-2] if "." in name else name
    count = heads.get(module, 0) or (config["num_attention_heads"] if module == "k_proj" else 0)
    if not count:
        return value
    half = value.shape[0] // count // 2
    return value.reshape(count, 2, half, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
