"""What both Tunix workers are given: its Llama with the right rotary base, float32 weights, LoRA through qwix.

Runs under the peer's Python.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import qwix
from flax import nnx
from tunix.models.llama3 import model as llama
from tunix.models.llama3 import params

PACKAGES = ("google-tunix", "jax", "flax", "qwix", "optax")


def mesh() -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))


def base_model(folder: str) -> Any:
    """The frozen model. Tunix never hands `rope_theta` of its configuration to its rotary embedding."""
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    llama.apply_rope = partial(llama.apply_rope, rope_theta=theta)
    wanted = llama.ModelConfig(
        num_layers=config["num_hidden_layers"],
        vocab_size=config["vocab_size"],
        embed_dim=config["hidden_size"],
        hidden_dim=config["intermediate_size"],
        num_heads=config["num_attention_heads"],
        head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        rope_theta=theta,
        norm_eps=config["rms_norm_eps"],
        weight_tying=config["tie_word_embeddings"],
    )
    return params.create_model_from_safe_tensors(folder, wanted, mesh(), jnp.float32)


def with_adapter(model: Any, job: dict[str, Any]) -> tuple[Any, int]:
    """(the model under LoRA, its weights shared with `model`; how many parameters the adapter has)."""
    provider = qwix.LoraProvider(
        module_path="|".join(f".*{name}" for name in job["target_modules"]),
        rank=job["rank"],
        alpha=float(job["alpha"]),
    )
    adapted = qwix.apply_lora_to_model(model, provider, **model.get_model_input())
    # qwix leaves the adapter on no mesh: where it lies is part of a compiled step.
    state = nnx.state(adapted)
    place = jax.sharding.NamedSharding(mesh(), jax.sharding.PartitionSpec())
    nnx.update(adapted, jax.tree.map(lambda x: jax.device_put(x, place), state))
    lora = jax.tree.leaves(nnx.state(adapted, nnx.LoRAParam))
    return adapted, sum(leaf.size for leaf in lora)


def optimizer(job: dict[str, Any]) -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(job["learning_rate"], weight_decay=0.0))
