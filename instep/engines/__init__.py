"""Which engines there are, what each can honour, and which one this machine should take."""

from __future__ import annotations

import importlib
import importlib.util
import platform
from dataclasses import dataclass
from typing import Any, cast

from instep.config import AdapterSettings, ModelSettings
from instep.engines.base import Engine
from instep.errors import InputError


@dataclass(frozen=True)
class Known:
    """Where an engine is, the package that it needs, and the values of settings that it can honour."""

    module: str
    cls: str
    package: str
    devices: tuple[str, ...]
    quantizations: tuple[str, ...] = ("none",)
    kinds: tuple[str, ...] = ("lora",)


ENGINES: dict[str, Known] = {
    "torch": Known(
        "instep.engines.torch.engine",
        "TorchEngine",
        "torch",
        ("cpu", "mps", "cuda"),
        kinds=("lora", "full"),
    ),
    "mlx": Known(
        "instep.engines.mlx.engine",
        "MlxEngine",
        "mlx_lm",
        ("cpu", "gpu"),
        quantizations=("none", "4bit", "8bit"),
    ),
    "jax": Known(
        "instep.engines.jax.engine",
        "JaxEngine",
        "jax",
        ("cpu", "gpu", "tpu"),
        quantizations=("none", "4bit"),
    ),
}


def choose(
    name: str, model: ModelSettings | None = None, adapter: AdapterSettings | None = None
) -> tuple[str, str]:
    """Resolve "auto" to an engine that is installed. Returns (name, reason).

    Raises InputError, before anything loads, also where the engine cannot honour `model` or `adapter`.
    """
    chosen, reason = _choose(name)
    known = ENGINES[chosen]
    if model is not None:
        _honours(chosen, "model.device", model.device, ("auto", *known.devices))
        _honours(chosen, "model.quantization", model.quantization, known.quantizations)
    if adapter is not None:
        _honours(chosen, "adapter.kind", adapter.kind, known.kinds)
    return chosen, reason


def _choose(name: str) -> tuple[str, str]:
    installed = [key for key, known in ENGINES.items() if importlib.util.find_spec(known.package)]
    if name == "auto":
        if not installed:
            raise InputError(
                "no engine is installed: expected one of "
                + ", ".join(ENGINES)
                + "; pip install 'instep[torch]'"
            )
        mac = platform.system() == "Darwin" and platform.machine() == "arm64"
        if mac and "mlx" in installed:
            return "mlx", "default on Apple silicon"
        return installed[0], "first engine that is installed"
    if name not in ENGINES:
        raise InputError(f"engine {name!r} is not known: expected auto or one of " + ", ".join(ENGINES))
    if name not in installed:
        raise InputError(
            f"engine {name!r} needs the package {ENGINES[name].package}: pip install 'instep[{name}]'"
        )
    return name, "asked for"


def _honours(engine: str, setting: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        others = ", ".join(repr(name) for name in known)
        raise InputError(
            f"{setting} is {value!r}, which the {engine} engine cannot honour: it knows {others}"
        )


def part(engine: str, module: str) -> Any:
    """A module of an engine that is no verb, such as MLX's `convert`; imports its framework."""
    return importlib.import_module(f"instep.engines.{engine}.{module}")


def create(name: str) -> Engine:
    """An engine by its resolved name; imports its framework."""
    known = ENGINES[name]
    return cast(Engine, getattr(importlib.import_module(known.module), known.cls)())
