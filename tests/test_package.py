"""The package as a whole: what importing it costs, which way imports flow, what is shipped with it."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import metadata, resources
from pathlib import Path

import pytest

import instep
from instep import settings_file
from instep.config import GrpoSettings, SftSettings
from instep.errors import InputError
from instep.loops.stages import load_stages

ROOT = Path(instep.__file__).parent
FRAMEWORKS = {"torch", "mlx", "mlx_lm", "jax", "jaxlib", "optax", "flax"}
SLOW = FRAMEWORKS | {
    "transformers",
    "tokenizers",
    "huggingface_hub",
    "peft",
    "detect_secrets",
    "numpy.testing",
}

# Who may import whom: a module may import only from its own layer and from those before it.
LAYERS = [
    {"errors", "files"},
    {"records", "config", "objectives", "sampling"},
    {"settings_file", "sessions", "rendering", "batching", "tasks", "rewards", "advantages", "adapters"}
    | {"adapter_diff", "adapters_mlx_lm", "models", "models_pypi", "runs", "engines", "plan", "fitting"}
    | {"evaluation", "rollouts"},
    {"loops"},
    {"chat", "publishing"},
    {"cli"},
]


def modules() -> list[Path]:
    return sorted(path for path in ROOT.rglob("*.py") if path.name != "__main__.py")


def imports(path: Path) -> Iterator[str]:
    """Absolute names of what the file imports, anywhere in it, but not for type checking only."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    ignored = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in ignored:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def layer(part: str) -> int:
    for number, names in enumerate(LAYERS):
        if part in names:
            return number
    raise AssertionError(f"instep.{part} stands in no layer of this test: add it to one")


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_flow_one_way(path: Path) -> None:
    part = path.relative_to(ROOT).with_suffix("").parts[0]
    if part == "__init__":
        return
    own = layer(part)
    for name in imports(path):
        if name.startswith("instep.") and name != "instep.__version__":
            other = name.split(".")[1]
            assert layer(other) <= own, f"{path.relative_to(ROOT)} imports {name}, which stands above it"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_only_engines_import_a_framework(path: Path) -> None:
    parts = path.relative_to(ROOT).parts
    own = parts[1] if parts[0] == "engines" and len(parts) > 2 else None
    for name in imports(path):
        top = name.split(".")[0]
        if top in FRAMEWORKS:
            assert own is not None, f"{path.relative_to(ROOT)} imports {top}"
        for engine in ("torch", "mlx", "jax"):
            if f"{name}.".startswith(f"instep.engines.{engine}."):
                assert own == engine, f"{path.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize("module", ["instep", "instep.config", "instep.engines", "instep.cli.app"])
def test_importing_is_light(module: str) -> None:
    program = f"import sys, json, {module}; print(json.dumps(sorted(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert not SLOW & set(json.loads(out))


def test_help_answers_at_once() -> None:
    """Under 0.5 s of work; the clock on the wall would also measure what else the machine does."""

    def seconds() -> float:
        before = os.times()
        done = subprocess.run([sys.executable, "-m", "instep", "--help"], capture_output=True, text=True)
        after = os.times()
        assert done.returncode == 0 and "quickstart" in done.stdout
        return (after.children_user - before.children_user) + (after.children_system - before.children_system)

    fastest = seconds()
    for _ in range(4):  # a busy machine makes even the CPU time longer
        if fastest < 0.5:
            break
        time.sleep(0.2)
        fastest = min(fastest, seconds())
    assert fastest < 0.5


def test_the_version_is_told() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "instep", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"instep {instep.__version__}\n"
    assert metadata.version("instep") == instep.__version__


def test_every_recipe_loads() -> None:
    shipped = settings_file.recipes()
    assert "quickstart" in shipped
    for name in shipped:
        if "stage" in settings_file.read_tree(name):
            assert load_stages(name)
            continue
        errors = []
        for kind in (SftSettings, GrpoSettings):
            try:
                settings_file.load_settings(kind, name)
                break
            except InputError as error:
                errors.append(str(error))
        else:
            pytest.fail(f"recipe {name}: {errors}")


def test_the_example_sessions_are_shipped() -> None:
    data = resources.files("instep") / "quickstart_data"
    for split in ("train", "held_out"):
        assert [item for item in (data / split).iterdir() if item.is_dir()]
