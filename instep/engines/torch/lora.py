"""Low-rank adapters (LoRA, arXiv 2106.09685) on frozen linear layers, and products that share an input."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from instep.adapters import lora_a_name, lora_b_name
from instep.engines.torch.optimizer import Trainables
from instep.errors import InputError

NARROW = 64  # rows up to which W·xᵀ is quicker on a CPU than x·Wᵀ (measured: 0.49 against 0.70 ms at 16 rows)


class LoraLinear(nn.Module):
    """A frozen linear layer with an adapter. `enabled` off gives the base layer: the reference model.

    `lora_a` [rank, in] and `lora_b` [out, rank] are the float32 masters; `a` and `b` the same in the type of
    the activations.
    """

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
        self.trainables = trainables
        self._product: SharedInput | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._product is None:
            self._product = SharedInput([self])
        return self._product(x)[0]


class SharedInput:
    """Linear layers that read the same input, as one product: [x·W₁ᵀ, x·W₂ᵀ, …] plus their low-rank parts.

    Their weights become views of one tensor [out₁ + out₂ + … + Σ rank, in] (no second copy is kept) whose last
    rows are the A matrices, for `infer`; adjacent A matrices are read as one.
    """

    def __init__(self, layers: Sequence[nn.Linear | LoraLinear]) -> None:
        self.layers = list(layers)
        self.ends = [0]
        for layer in self.layers:
            self.ends.append(self.ends[-1] + layer.out_features)
        self.adapted = [(i, layer) for i, layer in enumerate(self.layers) if isinstance(layer, LoraLinear)]
        first = self.layers[0]
        self.bias: torch.Tensor | None = None if first.bias is None else first.bias.data
        ranks = sum(layer.b.shape[1] for _, layer in self.adapted)
        self.whole = first.weight.data.new_empty(self.ends[-1] + ranks, first.in_features)
        self.weight = self.whole[: self.ends[-1]]
        for layer, (a, b) in zip(self.layers, pairwise(self.ends), strict=True):
            self.weight[a:b] = layer.weight.data
            layer.weight.data = self.weight[a:b]
        if len(self.layers) > 1:
            biases = [layer.bias for layer in self.layers]
            if any(bias is not None for bias in biases):
                parts = [
                    self.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias.data
                    for layer in self.layers
                ]
                self.bias = torch.cat(parts)
        self.masters = [m for _, layer in self.adapted for m in (layer.lora_a, layer.lora_b)]
        self.stacked = self._stack([layer.a for _, layer in self.adapted])
        self._diagonal = self.weight.new_zeros(self.ends[-1], ranks)
        self._version = -1

    @staticmethod
    def _stack(matrices: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """One view [Σ rank, in] over matrices that follow each other in memory; None where they do not."""
        if not matrices:
            return None
        for before, after in pairwise(matrices):
            if before.data_ptr() + before.numel() * before.element_size() != after.data_ptr():
                return None
        rows = sum(m.shape[0] for m in matrices)
        first = matrices[0]
        return torch.as_strided(first, (rows, first.shape[1]), (first.shape[1], 1), first.storage_offset())

    @property
    def enabled(self) -> bool:
        return bool(self.adapted) and self.adapted[0][1].enabled

    def part(self, y: torch.Tensor, i: int) -> torch.Tensor:
        return y[:, self.ends[i] : self.ends[i + 1]]

    def low(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """x·Aᵀ of every adapter [n, rank]."""
        if not self.enabled:
            return []
        if self.stacked is not None:
            together = rows @ self.stacked.t()
            return list(together.split([layer.a.shape[0] for _, layer in self.adapted], 1))
        return [rows @ layer.a.t() for _, layer in self.adapted]

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """rows [n, in] → all outputs side by side [n, Σ out], and what `low` gave."""
        low = self.low(rows)
        y = rows @ self.weight.t() if self.bias is None else torch.addmm(self.bias, rows, self.weight.t())
        for (i, layer), t in zip(self.adapted, low, strict=False):
            self.part(y, i).addmm_(t, layer.b.t(), alpha=layer.scale)
        return y, low

    def backward(
        self, grad: torch.Tensor, rows: torch.Tensor, low: Sequence[torch.Tensor], want_input: bool
    ) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        """grad [n, Σ out] → gradient of the input, and of the masters (A₁, B₁, A₂, B₂, …) in float32."""
        grads: list[torch.Tensor] = []
        grad_rows = grad @ self.weight if want_input else None
        for (i, layer), t in zip(self.adapted, low, strict=False):
            part = self.part(grad, i)
            grad_low = (part @ layer.b).mul_(layer.scale)
            if grad_rows is not None:
                grad_rows.addmm_(grad_low, layer.a)
            # [rank, out] is the quick orientation of this thin product.
            grads += [(grad_low.t() @ rows).float(), (t.t() @ part).float().mul_(layer.scale).t()]
        return grad_rows, grads

    def _bring_up_to_date(self) -> None:
        """The last rows of `whole`, and all B matrices as one [Σ out, Σ rank]: kept until the masters change."""
        version = self.adapted[0][1].trainables.version
        if self._version == version:
            return
        at = 0
        for i, layer in self.adapted:
            rank = layer.b.shape[1]
            self.whole[self.ends[-1] + at : self.ends[-1] + at + rank] = layer.a
            self._diagonal[self.ends[i] : self.ends[i + 1], at : at + rank] = layer.b
            at += rank
        self._version = version

    def infer(self, rows: torch.Tensor) -> torch.Tensor:
        """What `forward` gives first, without gradient; for few rows on a CPU the transposed product, in which
        W·xᵀ and A·xᵀ are one."""
        if rows.device.type != "cpu" or rows.shape[0] > NARROW:
            return self.forward(rows)[0]
        enabled = self.enabled
        if enabled:
            self._bring_up_to_date()
        together = (self.whole if enabled else self.weight) @ rows.t()
        y = together[: self.ends[-1]]
        if self.bias is not None:
            y += self.bias[:, None]
        if enabled:
            y.addmm_(self._diagonal, together[self.ends[-1] :], alpha=self.adapted[0][1].scale)
        return y.t()

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """x [..., in] → one output [..., out] for each layer."""
        rows = x.reshape(-1, x.shape[-1])
        if torch.is_grad_enabled():
            y = _Product.apply(rows, self, *(self.masters if self.enabled else ()))
            outputs = y if isinstance(y, tuple) else (y,)
        else:
            together = self.infer(rows)
            outputs = tuple(self.part(together, i) for i in range(len(self.layers)))
        return tuple(part.unflatten(0, x.shape[:-1]) for part in outputs)


class _Product(torch.autograd.Function):
    """SharedInput under autograd, with frozen weights: saves the input and its low-rank images only."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, product: SharedInput, *masters: torch.Tensor) -> Any:
        y, low = product.forward(rows)
        ctx.product = product
        ctx.masters = len(masters)
        ctx.save_for_backward(*([rows, *low] if masters else []))
        parts = tuple(product.part(y, i) for i in range(len(product.layers)))
        return parts if len(parts) > 1 else y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        grad = grads[0] if len(grads) == 1 else torch.cat(grads, 1)
        rows, *low = ctx.saved_tensors or (grad,)
        grad_rows, grad_masters = ctx.product.backward(grad, rows, low, ctx.needs_input_grad[0])
        return grad_rows, None, *grad_masters


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
