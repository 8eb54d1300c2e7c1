"""What every benchmark against a peer shares: the peer's environment, rows on disk, worker processes, memory,
noise, tables.

Only the standard library is imported at the top, because this file is imported by both sides: by the driver
and by workers that run under a peer's own Python, where instep is not installed. (A driver puts this folder on
its path by being in it or by running a file beside it.)
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

PEERS = Path(__file__).resolve().parent
ROOT = PEERS.parents[1]
INSTEP_PACKAGES = ("instep", "torch", "mlx", "jax", "transformers")
TRL_PACKAGES = ("trl", "torch", "transformers", "peft", "datasets", "accelerate")


# -- the peer's environment -------------------------------------------------------------------------------


def default_work_folder() -> Path:
    """Where environments, rows and adapters are kept between runs: the user's cache."""
    home = os.environ.get("XDG_CACHE_HOME")
    if home is None:
        home = Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    return Path(home) / "instep" / "benchmarks"


def peer_python(work: Path, requirements: Path) -> Path:
    """The Python of a virtual environment holding exactly `requirements`; made with pip where it is not there.

    The folder is named by the content of the requirements, and a marker is written last, so that a changed
    list or an interrupted installation gives a new environment. Nothing is installed in the caller's own.
    """
    key = hashlib.sha256(requirements.read_bytes() + sys.version.encode()).hexdigest()[:12]
    folder = work / f"{requirements.stem.removeprefix('requirements-')}-{key}"
    return _environment(folder, ["--requirement", str(requirements)])


def own_python(work: Path, extras: str) -> Path:
    """The Python of an environment holding this checkout of instep with these extras alone: what a user of one
    engine installs (transformers imports PyTorch, 150 MB, wherever it is there)."""
    lists = [ROOT / "pyproject.toml", ROOT / "constraints.txt"]
    found = b"".join(path.read_bytes() for path in lists) + sys.version.encode() + str(ROOT).encode()
    folder = work / f"instep-{extras.replace(',', '-')}-{hashlib.sha256(found).hexdigest()[:12]}"
    return _environment(folder, ["--editable", f"{ROOT}[{extras}]", "--constraint", str(lists[1])])


def _environment(folder: Path, install: list[str]) -> Path:
    """A virtual environment in `folder`, made with pip where it is not there; returns its Python."""
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    ready = folder / "ready"
    if not ready.is_file():
        print(f"making an environment in {folder} (once; some minutes)", file=sys.stderr)
        folder.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *install], check=True)
        subprocess.run([str(python), "-m", "pip", "check"], check=True, stdout=subprocess.DEVNULL)
        ready.write_text("ok\n", encoding="utf-8")
    return python


# -- rows on disk -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One training row. `supervised[t]` says whether the loss is taken on predicting `tokens[t]`."""

    tokens: list[int]
    supervised: list[bool]

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.supervised) or not self.tokens:
            raise ValueError(f"{len(self.tokens)} tokens and {len(self.supervised)} marks in one row")
        if self.supervised[0]:
            raise ValueError("the first token of a row has nothing before it and cannot be supervised")

    @property
    def supervised_tokens(self) -> int:
        return sum(self.supervised)


def write_rows(path: Path, rows: Iterable[Row]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({"tokens": r.tokens, "supervised": [int(s) for s in r.supervised]}) for r in rows)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def read_rows(path: Path) -> list[Row]:
    records = (json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line)
    return [Row(record["tokens"], [bool(mark) for mark in record["supervised"]]) for record in records]


# -- memory of this process -------------------------------------------------------------------------------


def _status_bytes(name: str) -> int | None:
    status = Path("/proc/self/status")
    if not status.is_file():
        return None
    for line in status.read_text(encoding="utf-8").split("\n"):
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return None


def resident_bytes() -> int:
    """Resident memory now (VmRSS; where there is no /proc, psutil's)."""
    resident = _status_bytes("VmRSS")
    if resident is None:
        import psutil

        resident = psutil.Process().memory_info().rss
    return resident


def peak_resident_bytes() -> int:
    """Highest resident memory so far (VmHWM; where there is no /proc, getrusage's)."""
    peak = _status_bytes("VmHWM")
    if peak is None:
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return peak


def reset_peak_resident() -> bool:
    """Let VmHWM start again from the present resident memory. False where the system has no such thing."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    except OSError:
        return False
    return True


class SampledPeak(threading.Thread):
    """Highest resident memory while it ran, looked at every 2 ms. For stretches in which the kernel's own
    high-water mark is reset by the code under measurement."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes = resident_bytes()
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(0.002):
            self.bytes = max(self.bytes, resident_bytes())

    def end(self) -> None:
        self._ended.set()
        self.join()
        self.bytes = max(self.bytes, resident_bytes())


@contextmanager
def sampled_peak() -> Iterator[SampledPeak]:
    sampler = SampledPeak()
    sampler.start()
    try:
        yield sampler
    finally:
        sampler.end()


# -- workers ----------------------------------------------------------------------------------------------


def run_worker(python: Path | str, script: Path, job: dict[str, Any], environment: dict[str, str]) -> Any:
    """Run `script` in a fresh process: it reads the job (JSON, first argument), writes a result (second).

    Raises RuntimeError with the end of the worker's output where it fails.
    """
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    clean |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    clean |= {"INSTEP_TRACKER": "none", **environment}  # peers report to no tracker either
    with tempfile.TemporaryDirectory(prefix="instep-benchmark-") as folder:
        asked, answered = Path(folder) / "job.json", Path(folder) / "result.json"
        asked.write_text(json.dumps(job), encoding="utf-8")
        done = subprocess.run(
            [str(python), str(script), str(asked), str(answered)],
            env=clean,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode != 0 or not answered.is_file():
            raise RuntimeError(f"{script.name} ended with {done.returncode}:\n{done.stdout[-4000:]}")
        return json.loads(answered.read_text(encoding="utf-8"))


def answer(work: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """A worker's main: `work(job) -> result`, with the job and the result as run_worker lays them out."""
    asked, answered = map(Path, sys.argv[1:3])
    result = work(json.loads(asked.read_text(encoding="utf-8")))
    answered.write_text(json.dumps(result), encoding="utf-8")


def interleaved(sides: Sequence[str], repeats: int) -> Iterator[tuple[int, str]]:
    """A B A B …: slow drifts of the machine (heat, other users) fall on all sides alike."""
    for repeat in range(repeats):
        for side in sides:
            yield repeat, side


def verdict(name: str, value: float, limit: float, at_most: bool) -> str:
    met = value <= limit if at_most else value >= limit
    target = f"{'at most' if at_most else 'at least'} {limit:g}"
    return f"{name}: {value:.3f} (target {target}: {'met' if met else 'MISSED'})"


def command_line() -> str:
    """The driver's as it was given, without this machine's folders."""
    shown = [Path(word).name if "/" in word else word for word in sys.argv[1:]]
    return f"python benchmarks/{Path(sys.argv[0]).name} {shlex.join(shown)}".rstrip()


def versions(*names: str) -> dict[str, str]:
    """Versions of those packages that are installed, python's own included."""
    installed = {name for found in metadata.distributions() if (name := found.metadata["Name"]) in names}
    return {
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in names if name in installed},
    }


def versions_of(python: Path, *names: str) -> dict[str, str]:
    """The same, under another Python."""
    code = f"import json, harness; print(json.dumps(harness.versions(*{names!r})))"
    done = subprocess.run([str(python), "-c", code], cwd=PEERS, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


# -- steps and time ---------------------------------------------------------------------------------------


@dataclass
class Step:
    """One optimizer step as a side saw it. `loss` is the mean over the step's supervised tokens."""

    seconds: float
    cpu_seconds: float
    """Of all threads of the process. Where other work shares the cores it is the steadier figure of the two."""
    loss: float
    tokens: int
    supervised_tokens: int


@dataclass
class StepLog:
    """Times whole steps: from the end of the last one (or `begin`) to the end of this one."""

    steps: list[Step] = field(default_factory=list)
    _began: float = 0.0
    _last: float = 0.0
    _last_cpu: float = 0.0

    def begin(self) -> None:
        self._began = self._last = time.perf_counter()
        self._last_cpu = time.process_time()

    def end_step(self, loss: float, tokens: int, supervised_tokens: int) -> None:
        now, cpu = time.perf_counter(), time.process_time()
        self.steps.append(Step(now - self._last, cpu - self._last_cpu, loss, tokens, supervised_tokens))
        self._last, self._last_cpu = now, cpu

    @property
    def seconds(self) -> float:
        """From `begin` to the end of the last step."""
        return self._last - self._began

    def as_json(self) -> list[dict[str, float]]:
        return [asdict(step) for step in self.steps]


# -- noise ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Noise:
    """How busy the rest of the machine was over one second: cores used by other processes, load average."""

    when: str
    load_average: float
    other_cores: float
    busiest: list[str]

    @property
    def quiet(self) -> bool:
        return self.other_cores < 0.1

    def __str__(self) -> str:
        text = f"{self.when}: load average {self.load_average:.2f}, other processes use {self.other_cores:.2f} cores"
        if not self.quiet:
            text += (
                f"\nWARNING: the machine is not quiet ({', '.join(self.busiest)}): do not quote these figures"
            )
        return text


def noise(when: str) -> Noise:
    """Look at all processes but this one for a second. The load average decays over a minute; the cores do not."""
    import psutil

    me = os.getpid()
    before: dict[int, tuple[psutil.Process, float]] = {}
    for process in psutil.process_iter():
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        if process.pid != me:
            before[process.pid] = (process, times.user + times.system)
    start = time.perf_counter()
    time.sleep(1.0)
    elapsed = time.perf_counter() - start
    shares: list[tuple[float, str]] = []
    for process, used in before.values():
        try:
            times = process.cpu_times()
            shares.append(((times.user + times.system - used) / elapsed, process.name()))
        except psutil.Error:
            continue
    shares.sort(reverse=True)
    busiest = [f"{name} {share:.2f}" for share, name in shares[:3] if share >= 0.05]
    return Noise(when, os.getloadavg()[0], sum(share for share, _ in shares), busiest)


# -- reports ----------------------------------------------------------------------------------------------


def machine() -> str:
    """One line: processor, cores that this process may use, memory, system."""
    import psutil

    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        models = [
            line.split(":", 1)[1].strip() for line in info.read_text().split("\n") if "model name" in line
        ]
        name = models[0] if models else name
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = psutil.virtual_memory().total / 2**30
    return f"{name}, {cores} cores, {memory:.0f} GiB, {platform.system()} {platform.machine()}"


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned: the first to the left, the others to the right."""
    widths = [max(len(line[i]) for line in [head, *rows]) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        rest = (cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))
        return "  ".join([cells[0].ljust(widths[0]), *rest])

    return "\n".join([line(head), "-" * (sum(widths) + 2 * (len(widths) - 1)), *map(line, rows)])


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


@dataclass
class Part:
    """One part of a benchmark as it is shown: a title, a table, and sentences under it."""

    title: str
    head: list[str]
    rows: list[list[str]]
    remarks: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    """Everything measured, for --json."""

    def text(self) -> str:
        return "\n".join(["", self.title, "", text_table(self.head, self.rows), *self.remarks])

    def markdown(self) -> str:
        remarks = "\n".join(f"- {remark}" for remark in self.remarks)
        return f"**{self.title}**\n\n{markdown_table(self.head, self.rows)}\n\n{remarks}".rstrip()


def end_on_sigterm() -> None:
    """So that a driver that is told to end takes its worker with it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def begin() -> Noise:
    """Show the machine and how quiet it is."""
    before = noise("before")
    print(machine(), before, sep="\n", flush=True)
    return before


def finish(before: Noise, parts: list[Part], file: Path | None, peer: dict[str, str] | None = None) -> None:
    """Look at the noise again, show the block for docs/log.md, and write everything measured to `file`.

    `peer`: the versions on the peer's side, where there is one.
    """
    after = noise("after")
    own_versions, peer_versions = versions(*INSTEP_PACKAGES), peer or {}
    print("", after, sep="\n")
    report = markdown_report(command_line(), peer_versions, own_versions, parts, [before, after])
    print("\n--- to paste into docs/log.md ---\n", report, sep="\n")
    if file is not None:
        record = {
            "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "machine": machine(),
            "command": command_line(),
            "versions": {"peer": peer_versions, "instep": own_versions},
            "noise": [asdict(before), asdict(after)],
            "parts": {part.title: part.data for part in parts},
        }
        file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def markdown_report(
    command: str,
    peer_versions: dict[str, str],
    own_versions: dict[str, str],
    parts: list[Part],
    noises: list[Noise],
) -> str:
    """A block to paste into docs/log.md."""

    def listed(found: dict[str, str]) -> str:
        return ", ".join(f"{name} {version}" for name, version in found.items())

    quiet = "quiet before and after" if all(n.quiet for n in noises) else "NOT quiet: not to be quoted"
    head = [
        f"- date: {time.strftime('%Y-%m-%d')}",
        f"- machine: {machine()}; {quiet}",
        f"- command: `{command}`",
        f"- instep's side: {listed(own_versions)}",
        *([f"- the peer's side: {listed(peer_versions)}"] if peer_versions else []),
    ]
    return "\n\n".join(["\n".join(head), *(part.markdown() for part in parts)]) + "\n"
