"""The LM head apart from the backbone, and log-probabilities at sites without a [K, V] tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from instep.engines.mlx.optimizer import number

BACKBONES = ("model", "transformer", "backbone")
BLOCK = 128
Head = Callable[[mx.array], mx.array]


class _Through(nn.Module):
    """Stands where the backbone stood and returns its input; other attributes are the backbone's."""

    def __init__(self, real: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "_real", real)

    def __call__(self, hidden: mx.array, *_: Any, **__: Any) -> mx.array:
        return hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_real"), name)


def split(model: Any) -> tuple[Any, Head, str]:
    """(backbone, head, what was found): head(backbone(tokens)) = model(tokens) [R, L, V].

    The head is a twin of the model, of the same modules, whose backbone passes its input through: whatever the
    model does behind its last norm (tied embeddings, soft-capping, scaling) is kept. Checked on four tokens;
    where it does not hold the backbone is the whole model and the head does nothing.
    """
    whole = model.language_model if "language_model" in model and "model" not in model else model
    name = next((key for key in BACKBONES if isinstance(whole.get(key), nn.Module)), None)
    if name is None:
        return model, lambda logits: logits, f"full logits: {type(model).__module__} has no backbone"
    backbone = whole[name]
    kind: Any = type(whole)
    twin = kind.__new__(kind)
    nn.Module.__init__(twin)
    for key, value in whole.__dict__.items():
        object.__setattr__(twin, key, value)
    for key, value in whole.items():
        dict.__setitem__(twin, key, value)
    dict.__setitem__(twin, name, _Through(backbone))

    def head(hidden: mx.array) -> mx.array:
        return type(whole).__call__(twin, hidden)

    tokens = mx.array([[1, 2, 3, 4]])
    try:
        hidden = backbone(tokens)
        expected, got = model(tokens), head(hidden)
        apart = number(mx.abs(expected - got).max()) / max(1.0, number(mx.abs(expected).max()))
    except (TypeError, AttributeError, ValueError, IndexError) as error:
        return model, lambda logits: logits, f"full logits: {type(error).__name__}: {error}"
    if apart > 1e-3 or expected.shape != got.shape:
        return model, lambda logits: logits, "full logits: head(backbone(tokens)) differs from the model"
    return backbone, head, "at sites only: a twin without backbone gave the model's logits on four tokens"


def _logits(head: Head, hidden: mx.array, temperature: float) -> mx.array:
    """hidden [c, D] → float32 [c, V] at the temperature."""
    logits = head(hidden[None])[0].astype(mx.float32)
    return logits if temperature == 1.0 else logits / temperature


def _sum_over_vocabulary(values: mx.array) -> mx.array:
    """[c, V] → [c, 1], in two stages: MLX's own sum on a CPU adds up one by one, and over 50,000 float32 values that
    is off by 1e-4."""
    whole = values.shape[-1] // BLOCK * BLOCK
    total = mx.sum(mx.sum(values[:, :whole].reshape(values.shape[0], -1, BLOCK), -1), -1, keepdims=True)
    return total if whole == values.shape[-1] else total + mx.sum(values[:, whole:], -1, keepdims=True)


def _chunk(logits: mx.array, label: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """logits [c, V], label [c] → log-probability [c], label is the most likely token [c] (as float32), softmax [c, V].

    One exponential a logit: on a CPU MLX takes longer for it than for the product itself. A label that ties with
    the most likely token counts as right.
    """
    best = mx.max(logits, -1, keepdims=True)
    chosen = mx.take_along_axis(logits, label[:, None], -1)
    powers = mx.exp(logits - best)
    total = _sum_over_vocabulary(powers)
    correct = (chosen >= best)[:, 0].astype(mx.float32)
    return (chosen - best - mx.log(total))[:, 0], correct, powers / total


def site_logprob(
    head: Head, hidden: mx.array, label: mx.array, temperature: float, chunk: int, gradient: bool
) -> tuple[mx.array, mx.array]:
    """hidden [K, D], label int32 [K] → (log-probability float32 [K], label is the argmax bool [K]).

    The head is frozen. With `gradient` the derivative of each log-probability with respect to its hidden state is
    taken in the same pass and stored [K, D], so that the backward pass is one product (the idea of Liger Kernel,
    arXiv 2410.10989). Chunks are chained by `mx.depends`: without it MLX holds the logits of many at once.
    """
    cuts = [(a, min(a + chunk, hidden.shape[0])) for a in range(0, hidden.shape[0], chunk)]

    def chained(hidden: mx.array, label: mx.array, derivatives: bool) -> list[list[mx.array]]:
        parts: list[list[mx.array]] = []
        for a, b in cuts:
            piece = mx.depends([hidden[a:b]], parts[-1])[0] if parts else hidden[a:b]
            logits = _logits(head, piece, temperature)
            logprob, correct, probability = _chunk(logits, label[a:b])
            part = [logprob, correct]
            if derivatives:
                hit = mx.arange(logits.shape[-1])[None] == label[a:b, None]
                cotangent = mx.where(hit, 1.0, 0.0) - probability
                # Only what the derivative needs of this second forward pass is computed: nothing, if it is linear.
                _, (derivative,) = mx.vjp(lambda x: [_logits(head, x, temperature)], [piece], [cotangent])
                part.append(derivative)
            parts.append(part)
        return parts

    if not gradient:
        done = chained(hidden, label, False)
        return mx.concatenate([part[0] for part in done]), mx.concatenate([part[1] for part in done]) > 0.5

    @mx.custom_function
    def forward(hidden: mx.array, label: mx.array) -> Any:
        done = chained(hidden, label, True)
        return tuple(mx.concatenate([part[i] for part in done]) for i in range(3))

    @forward.vjp
    def backward(primals: Any, cotangents: Any, outputs: Any) -> Any:
        hidden, label = primals
        grad = (cotangents[0][:, None] * outputs[2].astype(mx.float32)).astype(hidden.dtype)
        return grad, mx.zeros_like(label)

    logprob, correct, _ = forward(hidden, label)  # type: ignore[misc]
    return logprob, correct > 0.5
