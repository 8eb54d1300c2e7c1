from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("jax")
pytest.importorskip("torch")
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
sys.path.insert(1, str(HERE.parent / "torch"))

import models  # noqa: E402


@pytest.fixture(scope="session")
def family(tmp_path_factory):
    """family(name) → folder of a tiny random model, made once."""
    root = tmp_path_factory.mktemp("models")
    made = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = models.make(name, root)
        return made[name]

    return get
