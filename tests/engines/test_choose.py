"""Which engine is taken, and settings that it cannot honour, before anything loads."""

from __future__ import annotations

import pytest

from instep import engines
from instep.config import AdapterSettings, ModelSettings
from instep.errors import InputError


def installed(*names: str):
    return lambda package: object() if package in names else None


def test_mlx_is_the_default_on_apple_silicon_only(monkeypatch):
    monkeypatch.setattr(engines.importlib.util, "find_spec", installed("torch", "mlx_lm", "jax"))
    for system, machine, expected in (
        ("Darwin", "arm64", "mlx"),
        ("Darwin", "x86_64", "torch"),
        ("Linux", "aarch64", "torch"),
    ):
        monkeypatch.setattr(engines.platform, "system", lambda system=system: system)
        monkeypatch.setattr(engines.platform, "machine", lambda machine=machine: machine)
        assert engines.choose("auto")[0] == expected
        assert engines.choose("torch")[0] == "torch"


def test_what_is_not_installed_or_known_says_what_to_do(monkeypatch):
    monkeypatch.setattr(engines.importlib.util, "find_spec", installed())
    with pytest.raises(InputError, match=r"no engine is installed.*pip install"):
        engines.choose("auto")
    with pytest.raises(InputError, match=r"needs the package torch: pip install 'instep\[torch\]'"):
        engines.choose("torch")
    with pytest.raises(InputError, match=r"'tensorflow' is not known: expected auto or one of torch"):
        engines.choose("tensorflow")


def test_settings_that_an_engine_cannot_honour_are_refused(monkeypatch):
    monkeypatch.setattr(engines.importlib.util, "find_spec", installed("torch", "mlx_lm", "jax"))
    for model, setting in (
        (ModelSettings(device="tpu"), "model.device"),
        (ModelSettings(quantization="4bit"), "model.quantization"),
    ):
        with pytest.raises(InputError, match=rf"{setting} is .*torch engine cannot honour"):
            engines.choose("torch", model)
    assert engines.choose("torch", ModelSettings(device="cpu"), AdapterSettings(kind="full"))[0] == "torch"
