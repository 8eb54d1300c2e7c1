"""GSM8K (arXiv 2110.14168): grade-school word problems with worked solutions that end in `#### answer`."""

from __future__ import annotations

import re
from pathlib import Path

from instep.config import TaskSettings
from instep.errors import InputError
from instep.records import Message
from instep.tasks.prompts import build_prompt
from instep.tasks.rows import read_rows
from instep.tasks.task import Task, Tasks, keep_apart

HUB_REPOSITORY = "openai/gsm8k"
HUB_FILE = "main/{split}-00000-of-00001.parquet"
CALCULATOR = re.compile(r"<<[^<>]*>>")


def load_gsm8k(settings: TaskSettings) -> Tasks:
    """Train and test split, from the folder `settings.path` or from the Hub; raises InputError."""
    return keep_apart("gsm8k", _split(settings, "train"), _split(settings, "test"))


def _split(settings: TaskSettings, split: str) -> list[Task]:
    path = _hub_file(split) if settings.path is None else Path(settings.path).expanduser() / f"{split}.jsonl"
    tasks: list[Task] = []
    for number, (where, row) in enumerate(read_rows(path)):
        question, worked = row.get("question"), row.get("answer")
        if not isinstance(question, str) or not isinstance(worked, str):
            raise InputError(f"{where}: expected the texts 'question' and 'answer', found {sorted(row)}")
        solution, found, answer = worked.rpartition("####")
        # The commas group thousands ("1,080"): they are typography, not part of the number.
        answer = answer.strip().replace(",", "")
        if not found or not answer:
            raise InputError(f"{where}: a task without an answer: expected a solution that ends in '#### 42'")
        tasks.append(
            Task(
                id=f"gsm8k/{split}/{number}",
                question=question,
                messages=build_prompt(settings, [Message("user", question.strip())], where),
                answer=answer,
                source=f"gsm8k/{split}",
                solution=CALCULATOR.sub("", solution).strip(),
            )
        )
    return tasks


def _hub_file(split: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    name = HUB_FILE.format(split=split)
    try:
        return Path(hf_hub_download(HUB_REPOSITORY, name, repo_type="dataset"))
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        raise InputError(
            f"{HUB_REPOSITORY}: {name} is not cached and could not be fetched ({type(error).__name__}); "
            f"go online once, or set task.path to a folder with train.jsonl and test.jsonl"
        ) from error
