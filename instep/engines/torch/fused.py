"""Leaner forwards for the modules of a decoder layer: fewer passes over memory, fewer saved activations.

Each replaces one module's forward where the module has the structure it is written for, and only after
`choose` has found it equal to the stock forward on a float32 copy of a layer. Frozen weights are assumed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from instep.engines.torch.attention import Plan, attend
from instep.engines.torch.layout import Layout, Span
from instep.engines.torch.lora import LoraLinear, SharedInput

TOLERANCE = 1e-4


def _normed(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(x / rms(x) · w, 1 / rms(x))."""
    wide = x.float()  # once: an operation on mixed types is several times slower
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    inverse = norm.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()
    unit = wide * inverse if wide is x else wide.mul_(inverse)
    if weight.dtype == x.dtype:  # rounded before the weight, as the stock modules of this form do
        return unit.to(x.dtype).mul_(weight), inverse
    return unit.mul_(weight).to(x.dtype), inverse


class _RmsNorm(torch.autograd.Function):
    """y = x / rms(x) · w. Saves x and 1 / rms(x); `weight` float32 or the type of x, frozen."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        y, inverse = _normed(x, weight, epsilon)
        ctx.save_for_backward(x, inverse, weight)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, inverse, weight = ctx.saved_tensors
        scaled = grad * weight if weight.dtype == torch.float32 else (grad * weight).float()
        unit = x * inverse
        mean = (scaled * unit).sum(-1, keepdim=True).div_(-x.shape[-1])
        return scaled.addcmul_(unit, mean).mul_(inverse).to(x.dtype), None, None


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    y = x * cos
    y[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
    y[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return y


class _Rope(torch.autograd.Function):
    """Rotary position embedding, halves rotated (arXiv 2104.09864). x [N, heads, d]; cos, sin [N, 1, d]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        cos, sin = ctx.saved_tensors
        half = grad.shape[-1] // 2
        out = grad * cos
        out[..., :half].addcmul_(grad[..., half:], sin[..., half:])
        out[..., half:].addcmul_(grad[..., :half], sin[..., :half], value=-1)
        return out, None, None


class _GatedMlp(torch.autograd.Function):
    """down(act(gate(x)) · up(x)). Saves x and gate and up [n, 2·F]; the activation is made again backward."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, wide: SharedInput, down: SharedInput, gelu: bool, *masters: torch.Tensor
    ) -> torch.Tensor:
        both, low = wide.forward(rows)
        gate, up = wide.part(both, 0), wide.part(both, 1)
        inner = (nn.functional.gelu(gate, approximate="tanh") if gelu else nn.functional.silu(gate)).mul_(up)
        y, low_down = down.forward(inner)
        ctx.settings = (wide, down, gelu, len(low))
        ctx.save_for_backward(rows, both, *low, *low_down)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        wide, down, gelu, count = ctx.settings
        rows, both, *low = ctx.saved_tensors
        gate, up = wide.part(both, 0), wide.part(both, 1)
        active = nn.functional.gelu(gate, approximate="tanh") if gelu else nn.functional.silu(gate)
        grad_inner, grad_down = down.backward(grad, active * up, low[count:], True)
        assert grad_inner is not None
        grad_both = torch.empty_like(both)
        torch.mul(grad_inner, active, out=wide.part(grad_both, 1))
        del active
        grad_inner.mul_(up)
        target = wide.part(grad_both, 0)
        if gelu:
            torch.ops.aten.gelu_backward.grad_input(grad_inner, gate, approximate="tanh", grad_input=target)
        else:
            torch.ops.aten.silu_backward.grad_input(grad_inner, gate, grad_input=target)
        grad_rows, grad_wide = wide.backward(grad_both, rows, low[:count], ctx.needs_input_grad[0])
        return grad_rows, None, None, None, *grad_wide, *grad_down


def _fuse_norm(module: Any) -> None:
    weight = module.weight.detach()
    offset = float(type(module)(2).weight.detach().sum()) == 0.0  # a fresh one starts at w − 1 (Gemma)
    factor = 1.0 + weight.float() if offset else weight
    epsilon: float = getattr(module, "variance_epsilon", None) or module.eps

    def forward(x: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():  # an autograd function costs as much as the work on a few rows
            return _normed(x, factor, epsilon)[0]
        return _RmsNorm.apply(x, factor, epsilon)  # type: ignore[return-value]

    module.forward = forward


def _fuse_mlp(module: Any) -> None:
    name = type(module.act_fn).__name__
    gelu = "GELU" in name.upper()
    wide, down = SharedInput([module.gate_proj, module.up_proj]), SharedInput([module.down_proj])

    def forward(x: torch.Tensor) -> torch.Tensor:
        masters = [*wide.masters, *down.masters]
        if not (wide.enabled or down.enabled):
            masters = []
        rows = x.reshape(-1, x.shape[-1])
        if not torch.is_grad_enabled():
            both = wide.infer(rows)
            gate, up = wide.part(both, 0), wide.part(both, 1)
            inner = (nn.functional.gelu(gate, approximate="tanh") if gelu else nn.functional.silu(gate)).mul_(
                up
            )
            return down.infer(inner).reshape(x.shape)
        return _GatedMlp.apply(rows, wide, down, gelu, *masters).view(x.shape)  # type: ignore[union-attr]

    module.forward = forward


def _fuse_attention(module: Any) -> None:
    settings = module.attention_settings
    product = SharedInput([module.q_proj, module.k_proj, module.v_proj])
    width = module.head_dim
    counts = [layer.out_features // width for layer in product.layers]
    normed = hasattr(module, "q_norm")

    def forward(
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        plan: Any = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        cos, sin = (x[0][:, None] for x in position_embeddings)
        if torch.is_grad_enabled():
            q, k, v = (x[0].unflatten(-1, (-1, width)) for x in product(hidden_states))
            if normed:
                q, k = module.q_norm(q), module.k_norm(k)
            q, k = _Rope.apply(q, cos, sin), _Rope.apply(k, cos, sin)
            v = v.contiguous()  # so that the product's own output (q and k before rotation) can be freed
        else:  # as few operations as it takes: on a few rows each costs more than its arithmetic
            together = product.infer(hidden_states[0]).contiguous().unflatten(-1, (-1, width))
            q, k, v = together.split(counts, 1)
            if normed:
                q, k = _rotated(module.q_norm(q), cos, sin), _rotated(module.k_norm(k), cos, sin)
            else:
                q, k = _rotated(together[:, : -counts[2]], cos, sin).split(counts[:2], 1)
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        output, _weights = attend(module, q, k, v, None, *settings, plan=plan)
        return module.o_proj(output.reshape(*hidden_states.shape[:-1], -1)), None

    module.forward = forward


def _is_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith("RMSNorm") and isinstance(
        getattr(module, "weight", None), nn.Parameter
    )


def _is_mlp(module: nn.Module) -> bool:
    names = ("gate_proj", "up_proj", "down_proj", "act_fn")
    return all(hasattr(module, name) for name in names) and type(getattr(module, "act_fn")).__name__ in (  # noqa: B009
        "SiLUActivation",
        "SiLU",
        "GELUTanh",
    )


def _is_attention(module: nn.Module) -> bool:
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "head_dim", "attention_settings")
    return all(hasattr(module, name) for name in names)


PATCHES: dict[str, tuple[Callable[[nn.Module], bool], Callable[[Any], None]]] = {
    "norm": (_is_norm, _fuse_norm),
    "mlp": (_is_mlp, _fuse_mlp),
    "attention": (_is_attention, _fuse_attention),
}


def apply(modules: Sequence[nn.Module], names: Sequence[str]) -> None:
    """Patch every module below the given ones that one of the named patches fits."""
    for top in modules:
        for module in list(top.modules()):
            for name in names:
                fits, fuse = PATCHES[name]
                if not isinstance(module, LoraLinear) and fits(module):
                    fuse(module)


def _run(layer: nn.Module, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> list[torch.Tensor]:
    """Output of a layer, the gradient of its input, and its output where no gradient is wanted (another path)."""
    tokens = x.shape[1]
    position = torch.arange(tokens)[None]
    layout = Layout(*(position[0].numpy(),) * 3, spans=(Span(0, tokens),))  # type: ignore[arg-type]
    x = x.clone().requires_grad_(True)

    def forward() -> torch.Tensor:
        output = layer(
            x, attention_mask=None, position_ids=position, position_embeddings=(cos, sin), plan=Plan(layout)
        )
        return output[0] if isinstance(output, tuple) else output

    output = forward()
    (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()
    assert x.grad is not None
    with torch.no_grad():
        return [output.detach(), x.grad, forward()]


class _Listener:
    """A plan that notes on each attention module what its stock forward hands to attention."""

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        module.attention_settings = (scale, window, softcap)
        return torch.zeros_like(query).transpose(1, 2)


def listen(decoder: Any) -> None:
    """Run the stock decoder on one token, so that every attention module knows its scale, window and cap."""
    device = next(decoder.parameters()).device
    ids = torch.zeros(1, 1, dtype=torch.int64, device=device)
    with torch.no_grad():
        decoder(input_ids=ids, position_ids=ids, use_cache=False, plan=_Listener())


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    """What tells layers of one model apart: classes, plain settings and shapes of all their modules."""
    told = []
    for name, module in layer.named_modules():
        plain = {
            k: v
            for k, v in vars(module).items()
            if isinstance(v, (bool, int, float, str, tuple)) and k[0] != "_"
        }
        plain.pop("layer_idx", None)
        shapes = tuple(tuple(p.shape) for p in module.parameters(recurse=False))
        told.append(
            (name, type(module).__name__, tuple(sorted((k, str(v)) for k, v in plain.items())), shapes)
        )
    return tuple(told)


def _difference(
    stock: nn.Module, name: str, inputs: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]
) -> str:
    """Empty where the named patch changes nothing, else what it does."""
    patched = copy.deepcopy(stock)
    apply([patched], [name])
    try:
        got = _run(patched, *inputs)
    except (TypeError, ValueError, RuntimeError, AttributeError) as failure:
        return type(failure).__name__
    error = max(float((a - b).norm() / b.norm()) for a, b in zip(got, expected, strict=True))
    return "" if error < TOLERANCE else f"differs by {error:.1e}"


def choose(layers: Sequence[nn.Module], head_dim: int) -> tuple[list[str], str]:
    """The patches that equal the stock modules, and a line that says which, why, and which do not.

    One layer of each kind is copied to float32 on the CPU and run on a few tokens, forward and backward, and
    forward alone.
    """
    generator = torch.Generator().manual_seed(0)
    kinds = {_kind(layer): layer for layer in layers}
    good = [
        n for n, (fits, _) in PATCHES.items() if any(fits(m) for layer in layers for m in layer.modules())
    ]
    bad: dict[str, str] = {}
    for layer in kinds.values():
        stock = copy.deepcopy(layer).to("cpu", torch.float32)
        width = next(m.in_features for m in stock.modules() if isinstance(m, nn.Linear))
        x = torch.randn(1, 12, width, generator=generator)
        cos, sin = torch.randn(2, 1, 12, head_dim, generator=generator).unbind(0)
        try:
            expected = _run(stock, x, cos, sin)
        except (TypeError, ValueError, RuntimeError, AttributeError) as error:
            return [], f"none: a layer cannot be run alone ({type(error).__name__})"
        for name in list(good):
            bad[name] = _difference(stock, name, (x, cos, sin), expected)
            if bad[name]:
                good.remove(name)
    said = f"{', '.join(good) or 'none'}: equal to the stock modules within {TOLERANCE}"
    return good, said + "".join(f"; {name} stays stock ({why})" for name, why in bad.items() if why)
