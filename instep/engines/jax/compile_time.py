"""How functions are compiled, and how long that has taken, apart from how long steps take.

Tracing, a small share, is not in it: its events are nested and would count twice.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cached_property
from typing import Any, Generic, ParamSpec, TypeVar

import jax

EVENTS = (
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "/jax/core/compile/backend_compile_duration",
)
P = ParamSpec("P")
R = TypeVar("R")
CPU_OPTIONS = {"xla_backend_optimization_level": "2"}
"""LLVM's third level takes a quarter longer to compile a step, and the step is no quicker for it: the time goes to
matrix products, which are library calls."""


class Compiled(Generic[P, R]):
    """jax.jit with the options of the backend, which is only asked for at the first call: several processes must
    have joined by then."""

    def __init__(self, function: Callable[P, R], **settings: Any) -> None:
        self._function, self._settings = function, settings

    @cached_property
    def jitted(self) -> Any:
        own = any(name in os.environ.get("XLA_FLAGS", "") for name in CPU_OPTIONS)  # what the user sets wins
        options = CPU_OPTIONS if jax.default_backend() == "cpu" and not own else None
        return jax.jit(self._function, compiler_options=options, **self._settings)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.jitted(*args, **kwargs)


def compiled(**settings: Any) -> Callable[[Callable[P, R]], Compiled[P, R]]:
    """The decorator; settings are those of jax.jit."""
    return lambda function: Compiled(function, **settings)


class CompileTime:
    """Seconds of lowering and compiling in this process, and how many programs were compiled."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.programs = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: Any) -> None:
        if event in EVENTS:
            self.seconds += duration_secs
            self.programs += event == EVENTS[-1]


COMPILED = CompileTime()
"""One for the process, as its listener cannot be taken back."""
