"""A model folder's weights as stacked arrays [layers, …], on the mesh, in the type that they are computed in.

Matrices that read the same input lie in one: `qkv` [(H + 2·H_kv)·d, D] and `gate_up` [2·F, D].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from instep.engines.jax import nf4
from instep.engines.jax.architecture import Architecture
from instep.engines.jax.mesh import DATA, MODEL, Placement
from instep.errors import InputError

Weights = dict[str, Any]
MATRICES: dict[str, tuple[str, ...]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""Stacked name → the modules whose weights lie in it, one after the other along the outputs."""
MODULE = {path.rpartition(".")[2]: path for paths in MATRICES.values() for path in paths}
"""Last name of a linear layer → its path inside a decoder layer."""
AXES = {
    "qkv": (None, MODEL, DATA),
    "o": (None, DATA, MODEL),
    "gate_up": (None, MODEL, DATA),
    "down": (None, DATA, MODEL),
}
"""How the stacked matrices [layers, out, in] are split over the mesh."""


def _norms(architecture: Architecture) -> dict[str, tuple[str, int]]:
    """Stacked name → (name on disk, width) of the norms inside a layer."""
    hidden, head = architecture.hidden, architecture.head_dim
    norms = {"input_norm": ("input_layernorm", hidden)}
    if architecture.sandwich_norms:
        norms |= {
            "attention_norm": ("post_attention_layernorm", hidden),
            "mlp_norm": ("pre_feedforward_layernorm", hidden),
            "output_norm": ("post_feedforward_layernorm", hidden),
        }
    else:
        norms["mlp_norm"] = ("post_attention_layernorm", hidden)
    if architecture.qk_norm:
        norms |= {"q_norm": ("self_attn.q_norm", head), "k_norm": ("self_attn.k_norm", head)}
    return norms


class Source:
    """The tensors of a folder under the names of a plain text model, whatever prefix they have there."""

    def __init__(self, tensors: Mapping[str, np.ndarray], path: str) -> None:
        self.path = path
        self.tensors = {name.replace("language_model.", "", 1): value for name, value in tensors.items()}

    def get(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Raises InputError where the tensor is missing or of another shape."""
        value = self.tensors.get(name)
        if value is None:
            raise InputError(
                f"{self.path}: the weight {name} is not in its files: they belong to another architecture or are "
                "incomplete"
            )
        if value.shape != shape:
            raise InputError(
                f"{self.path}: {name} has shape {list(value.shape)}, expected {list(shape)} by its config.json"
            )
        return value


def load_weights(
    tensors: Mapping[str, np.ndarray],
    architecture: Architecture,
    dtype: Any,
    placement: Placement,
    quantization: str,
    path: str,
) -> Weights:
    """{"embed" [V, D], "head" [V, D] where it is not tied, "norm" [D], "layers": {name: [layers, …]}}.

    Quantized matrices are `nf4.Nf4`; embedding, head, norms and biases stay in `dtype`. One stacked array at a
    time is in memory twice. Raises InputError where a tensor is missing or does not fit config.json.
    """
    source, layers = Source(tensors, path), range(architecture.layers)
    vocabulary = (architecture.vocabulary, architecture.hidden)

    def put(value: np.ndarray, axes: tuple[str | None, ...] = ()) -> jax.Array:
        return placement.put(value.astype(dtype, copy=False), axes)

    weights: Weights = {
        "embed": put(source.get("model.embed_tokens.weight", vocabulary), (MODEL, DATA)),
        "norm": put(source.get("model.norm.weight", (architecture.hidden,))),
    }
    if not architecture.tied:
        weights["head"] = put(source.get("lm_head.weight", vocabulary), (MODEL, DATA))
    stacked: dict[str, Any] = {}
    for name, (stored, width) in _norms(architecture).items():
        rows = [source.get(f"model.layers.{i}.{stored}.weight", (width,)) for i in layers]
        stacked[name] = put(np.stack(rows))
    for name, modules in MATRICES.items():
        shapes = [architecture.widths[module.rpartition(".")[2]][::-1] for module in modules]

        def matrix(layer: int, modules: Any = modules, shapes: Any = shapes) -> np.ndarray:
            parts = [
                source.get(f"model.layers.{layer}.{module}.weight", shape)
                for module, shape in zip(modules, shapes, strict=True)
            ]
            return parts[0] if len(parts) == 1 else np.concatenate(parts)

        if quantization == "4bit":
            packed = [nf4.quantize(jnp.asarray(matrix(i).astype(np.float32))) for i in layers]
            stacked[name] = nf4.Nf4(
                placement.put(np.stack([np.asarray(p.codes) for p in packed]), (None, DATA)),
                placement.put(np.stack([np.asarray(p.absmax) for p in packed]), (None, DATA)),
            )
        else:
            whole = np.empty((len(layers), sum(s[0] for s in shapes), shapes[0][1]), dtype)
            for i in layers:
                whole[i] = matrix(i)
            stacked[name] = placement.put(whole, AXES[name])
        if architecture.qkv_bias if name == "qkv" else architecture.o_bias and name == "o":
            biases = [
                np.concatenate(
                    [source.get(f"model.layers.{i}.{m}.bias", s[:1]) for m, s in zip(modules, shapes, strict=True)]
                )
                for i in layers
            ]  # fmt: skip
            stacked[f"{name}_bias"] = put(np.stack(biases))
    weights["layers"] = stacked
    return weights


def count_parameters(architecture: Architecture) -> int:
    """Parameters of the base model, a tied head counted once."""
    linear = sum(a * b for a, b in architecture.widths.values())
    biases = 0
    if architecture.qkv_bias:
        biases += sum(architecture.widths[name][1] for name in ("q_proj", "k_proj", "v_proj"))
    if architecture.o_bias:
        biases += architecture.hidden
    norms = sum(width for _, width in _norms(architecture).values())
    tables = (1 if architecture.tied else 2) * architecture.vocabulary * architecture.hidden
    return architecture.layers * (linear + biases + norms) + tables + architecture.hidden


def count_bytes(weights: Weights) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
