"""What keeps a run company: its tracker, the machine kept awake, the watch over memory, the heartbeat."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from instep.config import GrpoSettings, SftSettings
from instep.errors import TrainingError
from instep.files import writing
from instep.loops.listener import Listener, StopFlag
from instep.runs.awake import KeepAwake
from instep.runs.folder import RunFolder, in_use
from instep.runs.heartbeat import is_about_memory, read_heartbeat, silent_end
from instep.runs.machine import Reading, read_machine
from instep.runs.mirror import Mirror
from instep.runs.watch import MemoryWatch
from instep.settings_file import flatten

MEGABYTE = 1_000_000
PAUSE_SECONDS = 1.0
OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "insufficient memory",
    "resource_exhausted",
    "unable to allocate",
    "[metal::malloc]",
)
"""How torch (CPU, CUDA, MPS), MLX, JAX and numpy say that memory has run out."""


class Unattended:
    """What a loop that trains alone, as in tests, has in the place of an attendance."""

    doing = "training"
    """For the heartbeat."""
    outcome = "finished"

    def figures(self) -> dict[str, int]:
        """The machine's memory, for the step's record."""
        return {}

    def after_step(self, step: int, checkpoint: Callable[[], None], stop: StopFlag) -> None:
        """Called by the loop after each step."""


class Attendance(Unattended):
    """Context manager around the training of one run.

    The loop asks `after_step` at each step. How the run ended is written to its heartbeat; an engine's failure for
    want of memory becomes a TrainingError that names the setting to lower.
    """

    def __init__(
        self,
        settings: SftSettings | GrpoSettings,
        run: RunFolder,
        mirror: Mirror,
        listener: Listener,
        step: int = 0,
        read: Callable[[], Reading] = read_machine,
    ) -> None:
        self._settings, self._run, self._mirror, self._listener = settings, run, mirror, listener
        self._awake = KeepAwake() if settings.run.keep_awake else None
        self._step = step
        self._swap = settings.run.on_swap
        self._watch = MemoryWatch(
            run.path,
            settings.run.watch_seconds,
            settings.run.swap_growth_megabytes * MEGABYTE,
            lambda: (self._step, self.doing),
            read,
        )
        self._told_problem = False

    def __enter__(self) -> Attendance:
        config = flatten(self._settings.model_dump(mode="json", exclude_none=True))
        self._mirror.begin(self._run.id, dict(config))
        with writing(self._run.path):
            self._watch.start()
        if self._awake:
            self._awake.__enter__()
        return self

    def figures(self) -> dict[str, int]:
        return {
            "memory_available_bytes": self._watch.latest.available_bytes,
            "memory_swap_used_bytes": self._watch.latest.swap_used_bytes,
        }

    def after_step(self, step: int, checkpoint: Callable[[], None], stop: StopFlag) -> None:
        """Hear the tracker and the watch, and do what `run.on_swap` asks for.

        Raises TrainingError, after a checkpoint, where that is to stop.
        """
        self._step = step
        self._mirror.check()
        if self._awake and (why := self._awake.failed()):
            self._listener.note(f"the machine may fall asleep while this runs: {why}")
        if self._watch.problem and not self._told_problem:
            self._told_problem = True
            self._listener.note(self._watch.problem)
        if not self._watch.take_alarm():
            return
        grown = (
            f"swap has grown by {self._watch.swap_grown_bytes / 1e9:.1f} GB since the run began (this process holds "
            f"{self._watch.latest.resident_bytes / 1e9:.1f} GB)"
        )
        advice = memory_advice(self._settings)
        if self._swap == "warn":
            self._listener.note(f"{grown}: steps get much slower; {advice}")
            return
        checkpoint()
        if self._swap == "stop":
            raise TrainingError(
                f'stopped after step {self._step}, with a checkpoint, because {grown} (run.on_swap = "stop"): '
                f"{advice}, and go on with --resume --run {self._run.path}"
            )
        self._pause(grown, advice, stop)

    def _pause(self, grown: str, advice: str, stop: StopFlag) -> None:
        self._listener.note(
            f"paused after step {self._step}, with a checkpoint, because {grown}: close what else holds memory and it "
            f"goes on, or end it with Ctrl-C: then {advice}"
        )
        self.doing = "paused"
        began = time.monotonic()
        while not stop.requested and not self._watch.eased:
            time.sleep(PAUSE_SECONDS)
        self.doing = "training"
        self._watch.take_alarm()
        if not stop.requested:
            self._listener.note(f"going on after a pause of {time.monotonic() - began:.0f} s")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._awake:
                self._awake.__exit__()
        finally:
            self._stop_watch(self.outcome if error is None else _ending(error))
        if error is not None and is_out_of_memory(error):
            raise TrainingError(
                f"memory ran out after step {self._step} ({first_line(error)}); the last checkpoint is kept: "
                f"{memory_advice(self._settings)}, and go on with --resume --run {self._run.path}"
            ) from error

    def _stop_watch(self, ended: str) -> None:
        try:
            self._watch.stop(ended)
        except OSError as refused:  # such as a full disk, which may be why the run ends
            self._listener.note(f"how the run ended could not be written to its heartbeat: {refused}")


def _ending(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "stopped at once by a second Ctrl-C"
    return f"error: {type(error).__name__}: {first_line(error)}"


def first_line(error: BaseException) -> str:
    """What an exception says, without the rest."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception, of whatever framework, says that memory has run out."""
    if isinstance(error, MemoryError):
        return True
    told = f"{type(error).__name__}: {error}".lower()
    return isinstance(error, (RuntimeError, ValueError, OSError)) and any(
        word in told for word in OUT_OF_MEMORY
    )


def memory_advice(settings: SftSettings | GrpoSettings) -> str:
    """The setting to lower next, of those that change memory and speed but not the step."""
    model = settings.model
    if isinstance(settings, SftSettings) and settings.rows_per_batch > 1:
        return f"lower rows_per_batch (--set rows_per_batch=1; it is {settings.rows_per_batch})"
    if not model.gradient_checkpointing:
        return "set --set model.gradient_checkpointing=true"
    if isinstance(settings, GrpoSettings) and settings.tokens_per_batch > settings.rollouts.max_new_tokens:
        least = max(settings.tokens_per_batch // 2, settings.rollouts.max_new_tokens)
        return f"lower tokens_per_batch (--set tokens_per_batch={least}; it is {settings.tokens_per_batch})"
    if model.head_chunk > 64:
        return f"lower model.head_chunk (--set model.head_chunk=64; it is {model.head_chunk})"
    if isinstance(settings, SftSettings):
        return "start a new run with shorter rows (rendering.max_length) or a smaller model"
    return "start a new run with a smaller rollouts.group_size, shorter rollouts.max_new_tokens or a smaller model"


def tell_silent_end(path: Path, settings: SftSettings | GrpoSettings, listener: Listener) -> None:
    """Before a run goes on: say why it ended, where it ended without a word."""
    last = None if in_use(path) else read_heartbeat(path)
    end = silent_end(last)
    if end:
        listener.note(f"{end}; {memory_advice(settings)}" if is_about_memory(last) else end)
