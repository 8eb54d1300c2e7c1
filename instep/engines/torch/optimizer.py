"""The trainable parameters as flat float32 buffers, and AdamW over them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from instep.config import OptimizerSettings
from instep.engines.base import EngineState, StepReport
from instep.engines.checks import check_state


class Trainables:
    """Named parameters whose float32 masters, gradients and Adam moments are each one flat buffer.

    Memory: 16 bytes a parameter. Where `compute` differs from float32, a copy in that type is kept for the
    forward pass (`views`), refreshed after every change of the masters: 2 bytes more.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], device: torch.device, compute: torch.dtype
    ) -> None:
        self.shapes = dict(shapes)
        self.offsets: dict[str, int] = {}
        total = 0
        for name, shape in self.shapes.items():
            self.offsets[name] = total
            total += int(np.prod(shape))
        self.count = total
        self.master = torch.zeros(total, device=device)
        self.gradient = torch.zeros(total, device=device)
        self.exp_avg = torch.zeros(total, device=device)
        self.exp_avg_sq = torch.zeros(total, device=device)
        self.copy = (
            self.master if compute == torch.float32 else torch.zeros(total, dtype=compute, device=device)
        )
        self.followers: dict[str, nn.Parameter] = {}
        self.step = 0
        self.version = 0
        """Counts the changes of the masters."""

    def view(self, buffer: torch.Tensor, name: str) -> torch.Tensor:
        start = self.offsets[name]
        shape = self.shapes[name]
        return buffer[start : start + int(np.prod(shape))].view(shape)

    def parameter(self, name: str) -> nn.Parameter:
        """A leaf whose storage is the master's, and whose gradient accumulates in the flat buffer."""
        leaf = nn.Parameter(self.view(self.master, name))
        leaf.grad = self.view(self.gradient, name)
        return leaf

    def follow(self, name: str, parameter: nn.Parameter) -> None:
        """A parameter of the model that the master of this name trains (full fine-tuning)."""
        target = self.view(self.gradient, name)

        def collect(leaf: torch.Tensor) -> None:
            assert leaf.grad is not None
            target.add_(leaf.grad)
            leaf.grad = None

        parameter.register_post_accumulate_grad_hook(collect)
        self.followers[name] = parameter

    def refresh(self) -> None:
        """Bring the compute copy, and parameters in another type, up to date with the masters."""
        self.version += 1
        for name, parameter in self.followers.items():
            if parameter.dtype != torch.float32:
                parameter.data.copy_(self.view(self.master, name))
        if self.copy is not self.master:
            self.copy.copy_(self.master)

    def set(self, name: str, value: np.ndarray) -> None:
        self.view(self.master, name).copy_(torch.from_numpy(np.ascontiguousarray(value, np.float32)))

    def adamw(self, settings: OptimizerSettings, learning_rate: float, denominator: float) -> StepReport:
        """AdamW with bias correction and decoupled decay (Loshchilov & Hutter, arXiv 1711.05101).

        The gradient is divided by `denominator` and its global norm clipped; it is zero afterwards.
        """
        gradient = self.gradient
        norm = float(
            torch.linalg.vector_norm(gradient, dtype=torch.float64 if gradient.device.type == "cpu" else None)
        )
        norm /= denominator
        if not np.isfinite(norm):
            gradient.zero_()
            return StepReport(gradient_norm=norm, applied=False)
        clip = min(1.0, settings.clip_norm / norm) if norm > 0 else 1.0
        gradient.mul_(clip / denominator)
        self.step += 1
        beta1, beta2 = settings.beta1, settings.beta2
        self.exp_avg.lerp_(gradient, 1 - beta1)
        self.exp_avg_sq.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        if settings.weight_decay:
            self.master.mul_(1 - learning_rate * settings.weight_decay)
        correction1 = 1 - beta1**self.step
        correction2 = 1 - beta2**self.step
        # The gradient's buffer is free now: it holds the denominator of the update.
        torch.sqrt(self.exp_avg_sq, out=gradient)
        gradient.div_(correction2**0.5).add_(settings.epsilon)
        self.master.addcdiv_(self.exp_avg, gradient, value=-learning_rate / correction1)
        gradient.zero_()
        self.refresh()
        return StepReport(gradient_norm=norm, applied=True)

    def state(self) -> EngineState:
        def arrays(buffer: torch.Tensor) -> dict[str, np.ndarray]:
            flat = buffer.cpu().numpy()
            out = {}
            for name, shape in self.shapes.items():
                start = self.offsets[name]
                out[name] = flat[start : start + int(np.prod(shape))].reshape(shape).copy()
            return out

        return EngineState(arrays(self.master), arrays(self.exp_avg), arrays(self.exp_avg_sq), self.step)

    def load_state(self, state: EngineState) -> None:
        check_state(state, self.shapes)
        buffers = (
            (state.parameters, self.master),
            (state.exp_avg, self.exp_avg),
            (state.exp_avg_sq, self.exp_avg_sq),
        )
        for arrays, buffer in buffers:
            for name, value in arrays.items():
                source = torch.from_numpy(np.ascontiguousarray(value, np.float32))
                self.view(buffer, name).copy_(source)
        self.step = int(state.step)
        self.gradient.zero_()
        self.refresh()
