"""The LM head at sites only: log-probabilities of labels without a [K, V] tensor."""

from __future__ import annotations

from typing import Any

import torch


def _chunk_logits(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logits float32 [c, V], and their derivative with respect to the raw product where it is not 1."""
    logits = (hidden @ weight.t()).float()
    if bias is not None:
        logits += bias.float()
    if softcap is None:
        return logits, None
    tanh = logits.div_(softcap).tanh_()
    return tanh * softcap, 1 - tanh * tanh


class _SiteLogprob(torch.autograd.Function):
    """log softmax(softcap(h·Wᵀ + b) / T)[label] per site, and its derivative with respect to h, in one pass.

    With a frozen head the derivative W[label] − Σ_v p_v·W[v] (over T) is stored as [K, D], so that the backward
    pass is one multiplication. With a trainable head the logits are recomputed in the backward pass instead,
    because the head's own gradient needs the gradient of the loss. (The idea of Liger Kernel, arXiv 2410.10989.)
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        label: torch.Tensor,
        temperature: float,
        softcap: float | None,
        chunk: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        sites = hidden.shape[0]
        trainable = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        one_pass = ctx.needs_input_grad[0] and not trainable
        logprob = torch.empty(sites, dtype=torch.float32, device=hidden.device)
        correct = torch.empty(sites, dtype=torch.bool, device=hidden.device)
        derivative = torch.empty_like(hidden) if one_pass else None
        for a in range(0, sites, chunk):
            b = min(a + chunk, sites)
            target = label[a:b, None]
            logits, slope = _chunk_logits(hidden[a:b], weight, bias, softcap)
            correct[a:b] = logits.argmax(-1) == label[a:b]
            if temperature != 1.0:
                logits /= temperature
            top = logits.amax(-1, keepdim=True)
            chosen = logits.gather(1, target) - top
            logits.sub_(top).exp_()
            total = logits.sum(-1, keepdim=True)
            logprob[a:b] = (chosen - total.log()).squeeze(1)
            if derivative is not None:
                logits.div_(total).neg_()
                logits.scatter_add_(1, target, torch.ones_like(total))
                if slope is not None:
                    logits *= slope
                product = logits.to(weight.dtype) @ weight
                derivative[a:b] = product if temperature == 1.0 else product / temperature
            del logits, slope
        ctx.save_for_backward(derivative, hidden, weight, bias, label)
        ctx.settings = (temperature, softcap, chunk)
        ctx.mark_non_differentiable(correct)
        return logprob, correct

    @staticmethod
    def backward(ctx: Any, grad_logprob: torch.Tensor, _: Any) -> tuple[Any, ...]:
        derivative, hidden, weight, bias, label = ctx.saved_tensors
        if derivative is not None:
            return (grad_logprob[:, None].to(derivative.dtype) * derivative, *[None] * 6)
        temperature, softcap, chunk = ctx.settings
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        for a in range(0, hidden.shape[0], chunk):
            b = min(a + chunk, hidden.shape[0])
            logits, slope = _chunk_logits(hidden[a:b], weight, bias, softcap)
            logits = torch.softmax(logits / temperature, -1).neg_()
            logits.scatter_add_(1, label[a:b, None], torch.ones_like(logits[:, :1]))
            logits *= grad_logprob[a:b, None] / temperature
            if slope is not None:
                logits *= slope
            grad_hidden[a:b] = logits.to(weight.dtype) @ weight
            grad_weight += (logits.to(weight.dtype).t() @ hidden[a:b]).float()
            if grad_bias is not None:
                grad_bias += logits.sum(0)
        grad_weight = grad_weight.to(weight.dtype)
        return (
            grad_hidden,
            grad_weight,
            None if grad_bias is None else grad_bias.to(weight.dtype),
            *[None] * 4,
        )


def site_logprob(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    label: torch.Tensor,
    temperature: float = 1.0,
    softcap: float | None = None,
    chunk: int = 256,
) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden [K, D], weight [V, D], label int64 [K] → (log-probability float32 [K], label is the argmax [K]).

    At most [chunk, V] logits are alive at once. Softmax in float32.
    """
    return _SiteLogprob.apply(hidden, weight, bias, label, temperature, softcap, chunk)  # type: ignore[return-value]
