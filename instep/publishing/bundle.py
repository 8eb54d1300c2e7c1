"""What is published of a run: its files and card, checked before anything leaves the machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from instep.adapters import CONFIG_FILE, WEIGHTS_FILE, load_adapter
from instep.errors import InputError
from instep.loops.run import adapter_folder
from instep.models import HUB_ID
from instep.publishing.card import write_card
from instep.publishing.origin import Origin, origin_of
from instep.publishing.tensors import FLOATS, TensorFile
from instep.runs.folder import STAGES, RunFolder, in_use
from instep.runs.overview import load_run_settings
from instep.sessions.redaction import Redactor

CARD = "README.md"
VOCABULARY = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json")
"""Files of the base model that are words by their nature: not looked through for secrets."""


@dataclass(frozen=True)
class Bundle:
    """One run's files by their name in the repository: a path on disk, or the content itself."""

    run: Path
    repo: str
    files: Mapping[str, Path | bytes]

    @property
    def card(self) -> str:
        content = self.files[CARD]
        assert isinstance(content, bytes)
        return content.decode("utf-8")

    def sizes(self) -> dict[str, int]:
        """Name → bytes, the card first."""
        return {
            name: len(value) if isinstance(value, bytes) else value.stat().st_size
            for name, value in self.files.items()
        }


def repositories(runs: list[Path], repo: str) -> list[str]:
    """The repository of each run: `owner/name`, with {run} in it for the run folder's name. Raises InputError."""
    if len(runs) > 1 and "{run}" not in repo:
        raise InputError(f"--repo {repo}: several runs need a name for each, such as owner/{{run}}")
    names = [repo.replace("{run}", run.resolve().name) for run in runs]
    for name in names:
        if not HUB_ID.fullmatch(name) or "/" not in name:
            raise InputError(f"--repo {name}: expected owner/name in letters, digits, '-', '_' and '.'")
    if len(set(names)) < len(names):
        raise InputError("two of the runs have the same name, so that one would replace the other on the Hub")
    return names


def make_bundle(run: Path, repo: str, base: str | None = None) -> Bundle:
    """The run's result, ready to be published to `repo`.

    base  Hub id of the base model, where the run was trained from a local folder
    Raises InputError for a run that is not finished, an adapter that is all zero or not finite, a base that has no
    name on the Hub, and anything in the texts that looks like a secret.
    """
    if (run / STAGES).is_file():
        raise InputError(f"{run} is a run of several stages: publish one of them, such as the last")
    settings = load_run_settings(run)
    summary = _finished(run)
    origin = origin_of(settings.model.path, settings.model.revision, base)
    card = write_card(run, settings, summary, origin, repo).encode("utf-8")
    files: dict[str, Path | bytes] = {CARD: card}
    files |= _model_files(run / "model") if settings.adapter.kind == "full" else _adapter_files(run, origin)
    _refuse_secrets(run, files)
    return Bundle(run, repo, files)


def _finished(run: Path) -> dict[str, Any]:
    if in_use(run):
        raise InputError(f"run {run} is being trained: wait for its end")
    summary = RunFolder(run).read_summary()
    if summary is None or not summary.get("finished"):
        raise InputError(f"run {run} has not finished: go on with it (--resume --run {run}), then publish it")
    return summary


def _adapter_files(run: Path, origin: Origin) -> dict[str, Path | bytes]:
    folder = adapter_folder(run)
    matrices, _ = load_adapter(folder)  # refuses what is not finite
    if not any(np.any(value) for name, value in matrices.items() if ".lora_B." in name):
        raise InputError(f"the adapter of run {run} adds nothing to the model (its B matrices are zero)")
    config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    config["base_model_name_or_path"] = origin.id
    if origin.revision:
        config["revision"] = origin.revision
    return {
        CONFIG_FILE: (json.dumps(config, indent=2) + "\n").encode("utf-8"),
        WEIGHTS_FILE: folder / WEIGHTS_FILE,
    }


def _model_files(folder: Path) -> dict[str, Path | bytes]:
    if not folder.is_dir():
        raise InputError(f"{folder} is missing: the run's model was moved or removed")
    files = {file.name: file for file in sorted(folder.iterdir()) if file.is_file() and file.name != CARD}
    weights = [TensorFile(path) for name, path in files.items() if name.endswith(".safetensors")]
    if not weights:
        raise InputError(f"{folder} holds no *.safetensors")
    for file in weights:
        for name, entry in file.entries.items():
            if entry.dtype in FLOATS and not np.isfinite(file.float32(name)).all():
                raise InputError(f"{file.path}: {name} holds values that are not finite: it is not published")
    return dict(files)


def _refuse_secrets(run: Path, files: Mapping[str, Path | bytes]) -> None:
    for name, content in files.items():
        if name in VOCABULARY or name.endswith(".safetensors"):
            continue
        data = content if isinstance(content, bytes) else content.read_bytes()
        text = data.decode("utf-8", errors="replace")
        redactor = Redactor()
        redactor.learn(text)
        redactor.text(text)
        if redactor.counts:
            kinds = ", ".join(sorted(redactor.counts))
            raise InputError(
                f"run {run}: {name} holds what looks like {kinds}: take it out of the run's settings, nothing was "
                "published"
            )
