"""Settings: precedence, and one clear line for each mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from instep.config import SftSettings
from instep.errors import InputError
from instep.settings_file import dump_settings, load_resolved, load_settings


def test_precedence_is_file_then_set_then_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.toml"
    file.write_text('seed = 1\nepochs = 2\n[adapter]\nrank = 4\n[model]\npath = "file"\n')
    settings = load_settings(
        SftSettings, str(file), ["epochs=3", "model.path=set"], {"model.path": "flag", "engine": None}
    )
    assert (settings.seed, settings.epochs, settings.adapter.rank, settings.model.path) == (1, 3, 4, "flag")
    assert settings.engine == "auto"
    monkeypatch.setenv("INSTEP_CONFIG", str(file))
    assert load_settings(SftSettings).seed == 1


def test_the_resolved_tree_survives_its_file(tmp_path: Path) -> None:
    settings = load_settings(SftSettings, None, ["adapter.target_modules=['q_proj']", "max_minutes=2.5"])
    path = tmp_path / "config.toml"
    path.write_text(dump_settings(settings))
    assert load_resolved(SftSettings, path) == settings


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("adapter.rnak=8", r"unknown setting 'adapter\.rnak'.*adapter\.rank"),
        ("learning_rate=1e-4", r"unknown setting 'learning_rate'.*optimizer\.learning_rate"),
        ("adapter.rank=0", r"adapter\.rank = 0.*greater than or equal to 1"),
        ("adapter.rank=many", r"adapter\.rank = 'many'.*integer"),
        ("optimizer.learning_rate=nan", r"optimizer\.learning_rate"),
        ("engine=tensorflow", r"engine = 'tensorflow'.*'auto'"),
        ("rows_per_batch=3", r"multiple of rows_per_batch \(3\)"),
        ("adapter.target_modules=[]", r"target_modules is empty"),
        ("seed", r"expected name=value"),
        ("seed.more=1", r"'?seed"),
    ],
)
def test_each_mistake_gets_one_clear_line(override: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        load_settings(SftSettings, None, [override])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        (["adapter.kind=full", "adapter.rank=8"], "adapter.rank"),
        (["data.validation_path=x", "data.validation_share=0.2"], "data.validation_share"),
        (["optimizer.schedule=constant", "optimizer.final_share=0.2"], "optimizer.final_share"),
    ],
)
def test_a_setting_that_would_not_be_used_is_an_error(overrides: list[str], name: str) -> None:
    with pytest.raises(InputError, match=f"{name} is set but would not be used"):
        load_settings(SftSettings, None, overrides)


def test_files_that_cannot_be_settings(tmp_path: Path) -> None:
    broken, binary = tmp_path / "broken.toml", tmp_path / "binary.toml"
    broken.write_text("seed = = 1")
    binary.write_bytes(b"\xff\xfe\x00")
    for path, message in (
        (broken, "not valid TOML"),
        (binary, "cannot be read"),
        (tmp_path, "cannot be read"),
    ):
        with pytest.raises(InputError, match=message):
            load_settings(SftSettings, str(path))
    with pytest.raises(InputError, match="not found"):
        load_settings(SftSettings, str(tmp_path / "none.toml"))
