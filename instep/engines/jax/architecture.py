"""What a decoder of a supported family looks like, and the reading of a `config.json`.

An Architecture is frozen and hashable: compiled functions take it as a static argument.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from instep.errors import InputError


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding (arXiv 2104.09864) of base `theta`; `factor` divides every frequency (linear
    scaling); `llama3` is (factor, low_freq_factor, high_freq_factor, original_max_position_embeddings)."""

    theta: float
    factor: float = 1.0
    llama3: tuple[float, float, float, float] | None = None

    def inverse_frequencies(self, head_dim: int) -> np.ndarray:
        """float32 [head_dim / 2], radians per position."""
        exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
        frequency = (1.0 / np.float32(self.theta) ** exponent) / np.float32(self.factor)
        if self.llama3 is None:
            return frequency.astype(np.float32)
        # Llama 3.1: long wavelengths are stretched by the factor, short ones kept, those between interpolated.
        factor, low, high, original = self.llama3
        wavelength = 2 * math.pi / frequency
        smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
        return ((1 - smooth) * frequency / factor + smooth * frequency).astype(np.float32)


@dataclass(frozen=True)
class Kind:
    """What differs between the layers of one model: rope, and how many positions back a query sees (None: all)."""

    rope: Rope
    window: int | None = None


@dataclass(frozen=True)
class Architecture:
    """Sizes and switches of a decoder. `kinds` are the different kinds of layers, `kind_of_layer` [layers] which
    of them each layer is."""

    family: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    epsilon: float
    kinds: tuple[Kind, ...]
    kind_of_layer: tuple[int, ...]
    tied: bool
    attention_scale: float
    activation: Literal["silu", "gelu_tanh"] = "silu"
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    """RMS norm of every query and key head before the rope (Qwen3, Gemma-3)."""
    norm_offset: float = 0.0
    """Added to the weight of every norm: 1 for Gemma, whose norms are stored around zero."""
    sandwich_norms: bool = False
    """Norms behind attention and MLP as well as before them (Gemma)."""
    embedding_scale: float = 1.0
    logit_softcap: float | None = None

    @property
    def widths(self) -> dict[str, tuple[int, int]]:
        """Last name of every linear layer → (in, out)."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q_proj": (self.hidden, query),
            "k_proj": (self.hidden, key),
            "v_proj": (self.hidden, key),
            "o_proj": (query, self.hidden),
            "gate_proj": (self.hidden, self.intermediate),
            "up_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }


class ConfigReader:
    """Typed reading of a decoder's `config.json`: every refusal names the field."""

    def __init__(self, raw: Mapping[str, Any], path: str) -> None:
        self.raw, self.path = raw, path

    def refuse(self, field: str, expected: str) -> InputError:
        found = str(self.raw.get(field))[:60]
        return InputError(
            f"{self.path}: config.json: {field} is {found}, which the jax engine cannot run: expected {expected}; "
            "the torch engine may know this model"
        )

    def integer(self, field: str, default: int | None = None) -> int:
        value = self.raw.get(field)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.refuse(field, "a positive whole number")
        return value

    def number(self, field: str, default: float | None = None) -> float:
        value = self.raw.get(field)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.refuse(field, "a positive number")
        return float(value)

    def flag(self, field: str, default: bool = False) -> bool:
        value = self.raw.get(field)
        return default if value is None else bool(value)

    def must_be_off(self, *fields: str) -> None:
        for field in fields:
            if self.raw.get(field):
                raise self.refuse(field, "it to be off")

    def activation(self, field: str, name: str) -> None:
        """Refuse every activation but the family's own."""
        if self.raw.get(field, name) != name:
            raise self.refuse(field, repr(name))

    def head_dim(self, heads: int, hidden: int) -> int:
        head_dim = self.integer("head_dim", hidden // heads)
        if head_dim % 2:
            raise self.refuse("head_dim", "an even number")
        return head_dim

    def rope(self, default_theta: float = 10_000.0) -> Rope:
        """The one rope of a model whose layers do not differ: transformers-5 `rope_parameters`, or the older
        `rope_theta` and `rope_scaling`."""
        field = "rope_scaling" if self.raw.get("rope_scaling") else "rope_parameters"
        parameters = self.raw.get(field) or {}
        nested = [name for name in ("full_attention", "sliding_attention") if name in parameters]
        if nested:
            raise self.refuse(field, "one set of rope parameters for all layers")
        return self.rope_of(field, parameters, self.number("rope_theta", default_theta))

    def rope_of(self, field: str, parameters: Mapping[str, Any], theta: float) -> Rope:
        """A Rope from its parameters, which stand in `field`; `theta` where they name none."""
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        partial = parameters.get("partial_rotary_factor", self.raw.get("partial_rotary_factor"))
        if partial not in (None, 1, 1.0):
            raise self.refuse(
                "partial_rotary_factor" if "partial_rotary_factor" in self.raw else field, "1.0"
            )

        def value(name: str, default: Any = None) -> float:
            found = parameters.get(name, default)
            if isinstance(found, bool) or not isinstance(found, int | float) or found <= 0:
                raise self.refuse(field, f"a positive {name} in it")
            return float(found)

        theta = value("rope_theta", theta)
        if kind == "default":
            return Rope(theta)
        if kind == "linear":
            return Rope(theta, factor=value("factor"))
        if kind == "llama3":
            original = self.raw.get("max_position_embeddings")
            return Rope(
                theta,
                llama3=(
                    value("factor"),
                    value("low_freq_factor"),
                    value("high_freq_factor"),
                    value("original_max_position_embeddings", original),
                ),
            )
        raise self.refuse(field, "rope_type default, linear or llama3")

    def windows(self, layers: int) -> list[int | None]:
        """The sliding window of each layer as Qwen writes it: `use_sliding_window` and `max_window_layers`, or
        `layer_types`."""
        if not self.flag("use_sliding_window") or self.raw.get("sliding_window") is None:
            return [None] * layers
        window = self.integer("sliding_window")
        types = self.raw.get("layer_types")
        if types is None:
            first = self.raw.get("max_window_layers", 28)
            return [window if layer >= first else None for layer in range(layers)]
        return [window if kind == "sliding_attention" else None for kind in self.layer_types(layers)]

    def layer_types(self, layers: int) -> list[str]:
        types = self.raw.get("layer_types")
        known = {"full_attention", "sliding_attention"}
        if not isinstance(types, list) or len(types) != layers or not set(types) <= known:
            raise self.refuse("layer_types", f"{layers} of full_attention and sliding_attention")
        return types


def kinds_of(layers: list[Kind]) -> tuple[tuple[Kind, ...], tuple[int, ...]]:
    """(the different kinds, in order of first appearance; which of them each layer is)."""
    kinds = list(dict.fromkeys(layers))
    return tuple(kinds), tuple(kinds.index(kind) for kind in layers)
