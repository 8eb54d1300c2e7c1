"""How long has been compiled, apart from how long steps take.

Tracing, a small share, is not in it: its events are nested and would count twice.
"""

from __future__ import annotations

from typing import Any

import jax

EVENTS = (
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "/jax/core/compile/backend_compile_duration",
)


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
