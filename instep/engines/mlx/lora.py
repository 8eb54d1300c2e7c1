"""Low-rank adapters (LoRA, arXiv 2106.09685) on frozen linear layers, float or quantized (QLoRA, 2305.14314)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from instep.errors import InputError


class LoraLinear(nn.Module):
    """A frozen linear layer with an adapter: lora_a [rank, in], lora_b [out, rank], float32.

    The low-rank product is computed in the activation's type. `enabled` off gives the base layer alone.
    """

    def __init__(self, base: nn.Module, lora_a: mx.array, lora_b: mx.array, scale: float) -> None:
        super().__init__()
        self.base = base
        self.lora_a, self.lora_b = lora_a, lora_b
        self.scale, self.enabled = scale, True

    def __call__(self, x: mx.array) -> mx.array:
        y = self.base(x)  # type: ignore[operator]
        if not self.enabled:
            return y
        low = (x @ self.lora_a.T.astype(x.dtype)) @ self.lora_b.T.astype(x.dtype)
        return y + (self.scale * low).astype(y.dtype)


class Dequantized(nn.Module):
    """A quantized linear layer or embedding whose product is a plain one with the weights made float for it.

    On a CPU `mx.quantized_matmul` is about 16 times slower than that. The float weights are made again in the
    backward pass, so that they never stay alive.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def _weight(self) -> mx.array:
        layer = self.layer
        return mx.dequantize(
            layer.weight,
            layer.scales,
            layer.get("biases"),
            group_size=layer.group_size,
            bits=layer.bits,
            mode=layer.mode,
        )

    def _product(self, x: mx.array) -> mx.array:
        @mx.custom_function
        def forward(x: mx.array) -> mx.array:
            return x @ self._weight().T.astype(x.dtype)

        @forward.vjp
        def backward(primals: Any, cotangent: mx.array, _: Any) -> mx.array:
            return cotangent @ self._weight().astype(cotangent.dtype)

        return forward(x)  # type: ignore[return-value]

    def __call__(self, x: mx.array) -> mx.array:
        if isinstance(self.layer, nn.QuantizedEmbedding):
            return self.layer(x)
        y = self._product(x)
        return y + self.layer.bias if "bias" in self.layer else y

    def as_linear(self, x: mx.array) -> mx.array:
        return self._product(x)


def _owner(model: nn.Module, path: str) -> tuple[Any, str]:
    """The module (or list) that holds the one at `path`, and its name there."""
    *parents, last = path.split(".")
    owner: Any = model
    for part in parents:
        owner = owner[int(part)] if isinstance(owner, list) else owner[part]
    return owner, last


def dequantize_products(model: nn.Module) -> int:
    """Put `Dequantized` in the place of each quantized layer; returns how many."""
    paths = [
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.QuantizedLinear, nn.QuantizedEmbedding))
    ]
    for path in paths:
        owner, last = _owner(model, path)
        owner[last] = Dequantized(owner[last])
    return len(paths)


def _linear(module: Any) -> bool:
    layer = module.layer if isinstance(module, Dequantized) else module
    return isinstance(layer, (nn.Linear, nn.QuantizedLinear))


def width_of(module: Any) -> tuple[int, int]:
    """(out, in) of a linear layer, quantized or not."""
    layer = module.layer if isinstance(module, Dequantized) else module
    out, width = layer.weight.shape
    return out, width * 32 // layer.bits if isinstance(layer, nn.QuantizedLinear) else width


def canonical(path: str) -> str:
    """The Hugging Face module path of an mlx-lm one: text models inside a multimodal one stand by themselves."""
    return path.removeprefix("language_model.")


def find_targets(model: nn.Module, targets: Sequence[str]) -> dict[str, Any]:
    """Path → linear layer whose last name is in `targets`, in the order of the layers.

    mlx-lm adapts nothing, silently, where a name is wrong; here that is an InputError.
    """
    found = {
        name: module
        for name, module in model.named_modules()
        if _linear(module) and name.rpartition(".")[2] not in ("lm_head", "layer", "base")
    }
    there = {name.rpartition(".")[2] for name in found}
    unknown = [target for target in targets if target not in there]
    if unknown:
        raise InputError(
            f"adapter.target_modules: {', '.join(unknown)} is no linear layer of {type(model).__module__}; "
            f"its linear layers are {', '.join(sorted(there))}"
        )
    chosen = [name for name in found if name.rpartition(".")[2] in targets]
    chosen.sort(key=lambda name: [int(part) if part.isdigit() else part for part in name.split(".")])
    return {name: found[name] for name in chosen}


def attach(model: nn.Module, path: str, lora_a: mx.array, lora_b: mx.array, scale: float) -> LoraLinear:
    """Put a LoraLinear in the place of the layer at `path`."""
    owner, last = _owner(model, path)
    owner[last] = LoraLinear(owner[last], lora_a, lora_b, scale)
    return owner[last]
