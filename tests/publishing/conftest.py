"""The command as a user runs it."""

from __future__ import annotations

from tests.cli.conftest import instep

__all__ = ["instep"]
