"""`instep doctor`: what this machine and this installation have, and whether each engine takes the right step."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import numpy as np

from instep.engines import ENGINES
from instep.loops import selftest
from instep.models_pypi import cache_folder
from instep.runs.machine import read_machine

Level = Literal["ok", "warning", "problem"]
CHECK_SECONDS = 180.0
"""An engine whose self-check takes longer has a problem; frameworks are imported anew for it."""
LOW_DISK_BYTES, LOW_MEMORY_BYTES = 5 * 10**9, 4 * 10**9
SLOW_PRODUCT = 20e9
HUB_SECONDS = 5.0
TWINS = (("mlx", "mlx-metal"), ("mlx", "mlx-cpu"), ("jax", "jaxlib"))
"""Packages that only work together in the same version."""

# What every engine must give on the tiny model below, as the PyTorch engine gave it in float32.
LOSSES = (6.702104, 6.5887801, 6.4725292)
GRADIENT_NORM = 1.7576001
GREEDY = (283, 65, 243, 301, 34, *[220] * 19)
TOLERANCE = 2e-4


@dataclass(frozen=True)
class Finding:
    """One line of the report. `advice` says what to do where the level is not ok."""

    name: str
    value: str
    level: Level = "ok"
    advice: str = ""


def examine(engines: list[str] | None = None) -> list[Finding]:
    """Everything but secrets: a token is reported as present or absent, never shown."""
    found = [*_machine(), *_disk(), *_packages(), *_hub()]
    for name in engines or list(ENGINES):
        found.append(_engine(name))
    return found


def _machine() -> list[Finding]:
    reading = read_machine()
    memory = f"{reading.available_bytes / 1e9:.1f} of {reading.total_bytes / 1e9:.1f} GB available"
    level: Level = "warning" if reading.available_bytes < LOW_MEMORY_BYTES else "ok"
    found = [
        Finding(
            "machine",
            f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}, Python "
            f"{platform.python_version()}",
        ),
        Finding("memory", memory, level, "close other programs, or see instep plan for what fits"),
    ]
    if reading.pressure not in (None, "normal"):
        found.append(Finding("memory pressure", str(reading.pressure), "warning", "close other programs"))
    a = np.ones((768, 768), np.float32)
    np.matmul(a, a)
    began = time.perf_counter()
    np.matmul(a, a)
    speed = 2 * 768**3 / (time.perf_counter() - began)
    slow: Level = "warning" if speed < SLOW_PRODUCT else "ok"
    advice = "another process may be busy; else numpy lacks an optimised BLAS"
    found.append(Finding("matrix product (numpy, float32)", f"{speed / 1e9:.0f} GFLOP/s", slow, advice))
    return found


def _disk() -> list[Finding]:
    from huggingface_hub.constants import HF_HUB_CACHE

    found = []
    for name, folder, variable in (
        ("runs", Path.cwd(), "--run"),
        ("Hub cache", Path(HF_HUB_CACHE), "HF_HOME"),
        ("converted models", cache_folder(), "INSTEP_HOME"),
    ):
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        free = shutil.disk_usage(there).free
        level: Level = "warning" if free < LOW_DISK_BYTES else "ok"
        found.append(
            Finding(f"disk for {name}", f"{free / 1e9:.0f} GB free", level, f"make room, or set {variable}")
        )
        if not os.access(there, os.W_OK):
            found.append(Finding(f"disk for {name}", "cannot be written", "problem", f"set {variable}"))
    return found


def _packages() -> list[Finding]:
    from packaging.requirements import Requirement
    from packaging.version import Version

    found, wrong = [], []
    for text in metadata.requires("instep") or []:
        wanted = Requirement(text)
        version = _version(wanted.name)
        if version is not None and not wanted.specifier.contains(version, prereleases=True):
            wrong.append(f"{wanted.name} {version} (needs {wanted.specifier})")
    for one, other in TWINS:
        a, b = _version(one), _version(other)
        if a and b and Version(a) != Version(b):
            wrong.append(f"{one} {a} with {other} {b} (must be the same)")
    shown = ("instep", "numpy", "transformers", "huggingface_hub", "trackio")
    listed = ", ".join(f"{name} {version}" for name in shown if (version := _version(name)))
    found.append(Finding("packages", listed))
    if wrong:
        advice = "pip install -U with -c constraints.txt"
        found.append(Finding("versions", "; ".join(dict.fromkeys(wrong)), "problem", advice))
    return found


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _hub() -> list[Finding]:
    from huggingface_hub import get_session, get_token
    from huggingface_hub.constants import ENDPOINT

    try:
        answer = get_session().head(ENDPOINT, timeout=HUB_SECONDS)
        reached = Finding("Hub", f"reached (status {answer.status_code})")
    except Exception as error:  # noqa: BLE001 - of whatever kind: the Hub is not reached, which is the finding
        advice = "models come from local folders, or from PyPI where instep knows a package"
        reached = Finding("Hub", f"not reached ({type(error).__name__})", "warning", advice)
    token = "present" if get_token() else "none (needed for gated and private models: hf auth login)"
    return [reached, Finding("Hub token", token)]


# --- engines -------------------------------------------------------------------------------------------------


def _engine(name: str) -> Finding:
    """The engine's self-check in a process of its own: a framework that aborts takes nothing with it."""
    package = ENGINES[name].package
    if importlib.util.find_spec(package) is None:
        return Finding(f"engine {name}", f"not installed (pip install 'instep[{name}]')")
    code = f"from instep.loops import doctor; doctor.report_engine({name!r})"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=CHECK_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return Finding(
            f"engine {name}", f"no answer in {CHECK_SECONDS:.0f} s", "problem", "see instep selftest"
        )
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return Finding(
            f"engine {name}", f"{package}: {last[:200]}", "problem", f"pip install -U 'instep[{name}]'"
        )
    return Finding(f"engine {name}", **json.loads(lines[-1]))


def report_engine(name: str) -> None:
    """Print the finding of one engine as JSON: what `examine` starts a process for."""
    with tempfile.TemporaryDirectory(prefix="instep-doctor-") as folder:
        print(json.dumps(check_engine(name, tiny_model(Path(folder)))))


def check_engine(name: str, folder: Path) -> dict[str, Any]:
    """Loss, gradient and greedy tokens on the tiny model against the stored ones: {value, level, advice}."""
    began = time.perf_counter()
    engine, _ = selftest.loaded(name, folder, "cpu", "float32")
    found = selftest.trace(engine, selftest.samples_of(VOCABULARY))
    apart = max(
        *(abs(a - b) / b for a, b in zip(found.losses, LOSSES, strict=True)),
        abs(found.norm - GRADIENT_NORM) / GRADIENT_NORM,
    )
    right = apart < TOLERANCE and tuple(found.greedy) == GREEDY
    del engine
    _, own = selftest.loaded(name, folder, "auto", "auto")
    package = ENGINES[name].package.replace("_", "-")
    value = (
        f"{package} {_version(package)}, takes {own.device} in {own.precision}; self-check "
        f"{'passed' if right else 'FAILED'}: {apart:.0e} from the stored step ({time.perf_counter() - began:.0f} s)"
    )
    if "blas" in own.choices:
        return {
            "value": f"{value}; BLAS {own.choices['blas']}",
            "level": "warning",
            "advice": "see docs/mlx.md",
        }
    advice = (
        ""
        if right
        else f"do not train with it: run instep selftest --engine {name} and report what it prints"
    )
    return {"value": value, "level": "ok" if right else "problem", "advice": advice}


VOCABULARY, HIDDEN, INNER, LAYERS, HEADS, KEY_HEADS = 320, 32, 64, 2, 4, 2


def tiny_model(folder: Path) -> Path:
    """Write a two-layer llama of seeded numbers, the same on every machine; needs no framework."""
    from safetensors.numpy import save_file

    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_HEADS,
        "head_dim": HIDDEN // HEADS,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "float32",
    }
    rng = np.random.Generator(np.random.Philox(key=np.array([7, 7], np.uint64)))

    def matrix(*shape: int) -> np.ndarray:
        return ((2.0 * rng.random(shape) - 1.0) * (1.5 / np.sqrt(shape[-1]))).astype(np.float32)

    arrays: dict[str, Any] = {"model.embed_tokens.weight": 1.5 * matrix(VOCABULARY, HIDDEN)}
    keys = HIDDEN // HEADS * KEY_HEADS
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        for name, out, width in (
            ("self_attn.q_proj", HIDDEN, HIDDEN),
            ("self_attn.k_proj", keys, HIDDEN),
            ("self_attn.v_proj", keys, HIDDEN),
            ("self_attn.o_proj", HIDDEN, HIDDEN),
            ("mlp.gate_proj", INNER, HIDDEN),
            ("mlp.up_proj", INNER, HIDDEN),
            ("mlp.down_proj", HIDDEN, INNER),
        ):
            arrays[f"{at}.{name}.weight"] = matrix(out, width)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            arrays[f"{at}.{norm}.weight"] = np.ones(HIDDEN, np.float32)
    arrays["model.norm.weight"] = np.ones(HIDDEN, np.float32)
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return folder
