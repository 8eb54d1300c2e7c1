"""What has to be set before `jax` is imported, and the start of several processes."""

from __future__ import annotations

import os


def prepare() -> None:
    """Let XLA take GPU memory as it needs it: by default it takes three quarters at once, which would make every
    memory figure meaningless and starve what else the machine does. A value of the user's own is kept."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def join_processes() -> str | None:
    """Join the other processes of a multi-process run, where JAX_COORDINATOR_ADDRESS names their coordinator.

    JAX_NUM_PROCESSES and JAX_PROCESS_ID are read beside it where the cluster is none that JAX knows. Returns a
    line on what was joined, None for a single process. Must run before the first use of a device.
    """
    import jax

    address = os.environ.get("JAX_COORDINATOR_ADDRESS")
    if not address:
        return None
    if not jax.distributed.is_initialized():
        count, index = os.environ.get("JAX_NUM_PROCESSES"), os.environ.get("JAX_PROCESS_ID")
        jax.distributed.initialize(
            coordinator_address=address,
            num_processes=int(count) if count else None,
            process_id=int(index) if index else None,
        )
    return f"process {jax.process_index()} of {jax.process_count()}"
