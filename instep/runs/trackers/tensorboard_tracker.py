"""TensorBoard: event files in the run's folder `tensorboard`; `tensorboard --logdir runs` shows all runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from instep.runs.trackers import Target

FOLDER = "tensorboard"


def load(home: Path, space_id: str | None) -> Any:
    from tensorboard.compat.proto import event_pb2, summary_pb2
    from tensorboard.summary.writer import event_file_writer

    return event_pb2, summary_pb2, event_file_writer


class TensorBoardRun:
    def __init__(self, target: Target) -> None:
        event, summary, writer = load(target.home, target.space_id)
        self._event, self._summary = event.Event, summary.Summary
        folder = target.run_folder / FOLDER
        folder.mkdir(exist_ok=True)
        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        self._writer = writer.EventFileWriter(str(folder))

    def log(self, step: int, values: dict[str, float]) -> None:
        entries = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        summary = self._summary(value=entries)
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        self._writer.close()


def open_tracker(target: Target, problem: Callable[[str], None]) -> TensorBoardRun:
    return TensorBoardRun(target)
