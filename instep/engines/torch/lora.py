"""Low-rank adapters (LoRA, arXiv 2106.09685) on frozen linear layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from instep.adapters import lora_a_name, lora_b_name
from instep.engines.torch.optimizer import Trainables
from instep.errors import InputError


class _LoraProduct(torch.autograd.Function):
    """y = x·Wᵀ + b + scale·(x·Aᵀ)·Bᵀ with W and b frozen. Saves x and x·Aᵀ; adds the low-rank part in place."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        master_a: torch.Tensor,
        master_b: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        scale: float,
    ) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        low = rows @ a.t()
        y = rows @ weight.t() if bias is None else torch.addmm(bias, rows, weight.t())
        y.addmm_(low, b.t(), alpha=scale)
        ctx.save_for_backward(rows, low, a, b, weight)
        ctx.scale = scale
        ctx.shape = x.shape
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        rows, low, a, b, weight = ctx.saved_tensors
        grad = grad.reshape(-1, grad.shape[-1])
        grad_low = (grad @ b).mul_(ctx.scale)
        grad_a = (grad_low.t() @ rows).float()
        grad_b = (grad.t() @ low).float().mul_(ctx.scale)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ weight
            grad_x.addmm_(grad_low, a)
            grad_x = grad_x.view(ctx.shape)
        return grad_x, grad_a, grad_b, None, None, None, None, None


class LoraLinear(nn.Module):
    """A frozen linear layer with an adapter. `enabled` off gives the base layer: the reference model."""

    def __init__(self, base: nn.Linear, name: str, trainables: Trainables, scale: float) -> None:
        super().__init__()
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self.lora_a = trainables.parameter(lora_a_name(name))
        self.lora_b = trainables.parameter(lora_b_name(name))
        self.a = trainables.view(trainables.copy, lora_a_name(name))
        self.b = trainables.view(trainables.copy, lora_b_name(name))
        self.scale = scale
        self.enabled = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.enabled:
            return nn.functional.linear(x, self.weight, self.bias)
        return _LoraProduct.apply(  # type: ignore[return-value]
            x, self.lora_a, self.lora_b, self.a, self.b, self.weight, self.bias, self.scale
        )


def find_targets(model: nn.Module, targets: Sequence[str]) -> list[str]:
    """Module paths of the linear layers whose last name is in `targets`, in model order.

    Raises InputError where a target names no linear layer of the decoder.
    """
    head = model.get_output_embeddings()  # type: ignore[operator]
    linear = [
        name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head
    ]
    there = {name.rpartition(".")[2] for name in linear}
    unknown = [target for target in targets if target not in there]
    if unknown:
        raise InputError(
            f"adapter.target_modules: {', '.join(unknown)} is no linear layer of {type(model).__name__}; "
            f"its linear layers are {', '.join(sorted(there))}"
        )
    return [name for name in linear if name.rpartition(".")[2] in targets]


def attach(model: nn.Module, names: Sequence[str], trainables: Trainables, scale: float) -> list[LoraLinear]:
    """Put a LoraLinear in the place of each named layer."""
    layers = []
    for name in names:
        parent, _, last = name.rpartition(".")
        owner = model.get_submodule(parent)
        layer = LoraLinear(getattr(owner, last), name, trainables, scale)
        setattr(owner, last, layer)
        layers.append(layer)
    return layers
