"""Which engines there are, and which one this machine should take."""

from __future__ import annotations

import importlib
import importlib.util
import platform
from typing import cast

from instep.engines.base import Engine
from instep.errors import InputError

# name → (module, class, the framework's package)
ENGINES: dict[str, tuple[str, str, str]] = {
    "torch": ("instep.engines.torch.engine", "TorchEngine", "torch"),
}


def choose(name: str) -> tuple[str, str]:
    """Resolve "auto" to an engine that is installed. Returns (name, reason). Raises InputError."""
    installed = [key for key, (_, _, package) in ENGINES.items() if importlib.util.find_spec(package)]
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
            f"engine {name!r} needs the package {ENGINES[name][2]}: pip install 'instep[{name}]'"
        )
    return name, "asked for"


def create(name: str) -> Engine:
    """An engine by its resolved name; imports its framework."""
    module, cls, _ = ENGINES[name]
    return cast(Engine, getattr(importlib.import_module(module), cls)())
