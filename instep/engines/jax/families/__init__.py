"""The families that the engine knows: `model_type` of a config.json → how its fields are read."""

from __future__ import annotations

from collections.abc import Callable

from instep import models
from instep.engines.jax.architecture import Architecture, ConfigReader
from instep.engines.jax.families import gemma3, llama, qwen2, qwen3
from instep.errors import InputError

FAMILIES: dict[str, Callable[[ConfigReader], Architecture]] = {
    "llama": llama.architecture,
    "qwen2": qwen2.architecture,
    "qwen3": qwen3.architecture,
    "gemma3_text": gemma3.architecture,
}


def read_architecture(path: str) -> Architecture:
    """The architecture of the model folder `path`. Raises InputError that names the field which does not fit."""
    raw = models.decoder_config(path)
    reader = ConfigReader(raw, path)
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise reader.refuse("model_type", f"one of {', '.join(FAMILIES)}")
    reader.must_be_off("quantization_config")
    made = FAMILIES[family](reader)
    if made.heads % made.kv_heads:
        raise InputError(
            f"{path}: config.json: num_attention_heads is {made.heads}, expected a multiple of "
            f"num_key_value_heads ({made.kv_heads})"
        )
    return made
