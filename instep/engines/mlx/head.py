"""The LM head apart from the backbone, and log-probabilities at sites without a [K, V] tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from instep.engines.mlx.optimizer import number

BACKBONES = ("model", "transformer", "backbone")
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
    hidden = backbone(tokens)
    if not isinstance(hidden, mx.array) or hidden.ndim != 3:
        return model, lambda logits: logits, "full logits: the backbone returns no hidden states [R, L, D]"
    expected, got = model(tokens), head(hidden)
    far = "full logits: head(backbone(tokens)) differs from the model"
    if expected.shape != got.shape:
        return model, lambda logits: logits, far
    if not number(mx.abs(expected - got).max()) <= 1e-3 * max(1.0, number(mx.abs(expected).max())):
        return model, lambda logits: logits, far
    return backbone, head, "at sites only: a twin without backbone gave the model's logits on four tokens"


def _chunk(head: Head, hidden: mx.array, label: mx.array, temperature: float) -> tuple[mx.array, mx.array]:
    """hidden [c, D], label [c] → log-probability float32 [c], label is the argmax bool [c]. Softmax in float32."""
    logits = head(hidden[None])[0].astype(mx.float32)
    if temperature != 1.0:
        logits = logits / temperature
    chosen = mx.take_along_axis(logits, label[:, None], -1)[:, 0]
    return chosen - mx.logsumexp(logits, -1), mx.argmax(mx.stop_gradient(logits), -1) == label


def site_logprob(
    head: Head, hidden: mx.array, label: mx.array, temperature: float, chunk: int, gradient: bool
) -> tuple[mx.array, mx.array]:
    """hidden [K, D], label int32 [K] → (log-probability float32 [K], label is the argmax bool [K]).

    The head is frozen. With `gradient` the derivative of each log-probability with respect to its hidden state is
    taken in the same pass and stored [K, D], so that the backward pass is one product (the idea of Liger Kernel,
    arXiv 2410.10989). Chunks are chained by `mx.depends`: without it MLX holds the logits of many at once.
    """
    cuts = [(a, min(a + chunk, hidden.shape[0])) for a in range(0, hidden.shape[0], chunk)]
    if not gradient:
        parts: list[tuple[mx.array, mx.array]] = []
        for a, b in cuts:
            piece = mx.depends(hidden[a:b], parts[-1][0]) if parts else hidden[a:b]  # type: ignore[arg-type]
            parts.append(_chunk(head, piece, label[a:b], temperature))
        return mx.concatenate([p for p, _ in parts]), mx.concatenate([c for _, c in parts])

    @mx.custom_function
    def forward(hidden: mx.array, label: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        logprobs: list[mx.array] = []
        derivatives: list[mx.array] = []
        corrects: list[mx.array] = []
        for a, b in cuts:
            piece = mx.depends(hidden[a:b], logprobs[-1]) if logprobs else hidden[a:b]  # type: ignore[arg-type]
            target = label[a:b]

            def evaluate(x: mx.array, target: mx.array = target) -> list[mx.array]:
                logprob, correct = _chunk(head, x, target, temperature)
                return [logprob, correct.astype(mx.float32)]

            ones = mx.ones((b - a,), mx.float32)
            (logprob, correct), (derivative,) = mx.vjp(evaluate, [piece], [ones, mx.zeros_like(ones)])
            logprobs.append(mx.depends(logprob, derivative))  # type: ignore[arg-type]
            derivatives.append(derivative)
            corrects.append(correct)
        return mx.concatenate(logprobs), mx.concatenate(derivatives), mx.concatenate(corrects)

    @forward.vjp
    def backward(primals: Any, cotangents: Any, outputs: Any) -> Any:
        hidden, label = primals
        grad = (cotangents[0][:, None] * outputs[1].astype(mx.float32)).astype(hidden.dtype)
        return grad, mx.zeros_like(label)

    logprob, _, correct = forward(hidden, label)  # type: ignore[misc]
    return logprob, correct > 0.5
