"""Upload to the Hugging Face Hub: one commit a run, private unless told otherwise."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any

from instep import __version__
from instep.errors import InputError
from instep.publishing.bundle import Bundle


@dataclass(frozen=True)
class Published:
    """Where a run's result lies now."""

    repo: str
    url: str
    commit: str
    created: bool
    private: bool


def upload(bundle: Bundle, private: bool = True) -> Published:
    """Create the repository where there is none, and commit all files at once: a reader sees all of it or nothing.

    HF_ENDPOINT and HF_TOKEN (or `hf auth login`) say where to and as whom. Raises InputError where the Hub
    refuses or cannot be reached, and where the repository is public but `private` is asked for.
    """
    from huggingface_hub import CommitOperationAdd, HfApi, get_token
    from huggingface_hub.errors import RepositoryNotFoundError
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    if not get_token():
        raise InputError("publishing needs a token of the Hub: run `hf auth login`, or set HF_TOKEN")
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), library_name="instep", library_version=__version__)
    operations = [
        CommitOperationAdd(
            path_in_repo=name, path_or_fileobj=value if isinstance(value, bytes) else str(value)
        )
        for name, value in bundle.files.items()
    ]
    try:
        try:
            there: Any = api.model_info(bundle.repo)
        except RepositoryNotFoundError:
            there = None
        if there is not None and private and there.private is False:
            raise InputError(
                f"{bundle.repo} exists and everybody can read it: choose another name, or publish there with --public"
            )
        if there is None:
            api.create_repo(bundle.repo, private=private)
        commit = api.create_commit(
            bundle.repo,
            operations,
            commit_message="Publish a run of instep" if there is None else "Publish a newer run of instep",
        )
    except InputError:
        raise
    except Exception as error:
        raise _explained(bundle.repo, error) from error
    is_private = private if there is None else there.private is not False
    return Published(bundle.repo, f"{api.endpoint}/{bundle.repo}", commit.oid, there is None, is_private)


def _explained(repo: str, error: Exception) -> Exception:
    """The Hub's refusal or a broken connection as one line; anything else as it is."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if isinstance(error, OfflineModeIsEnabled):
        return InputError("HF_HUB_OFFLINE is set: unset it to publish")
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        if status in (401, 403):
            return InputError(
                f"{repo}: the Hub refused ({status}): the token must be allowed to write there (`hf auth login`)"
            )
        return InputError(f"{repo}: the Hub answered {status} ({line}): nothing was committed, try again")
    broken = any(cls.__name__ == "TransportError" for cls in type(error).__mro__)
    if broken or isinstance(error, (OSError, RuntimeError)):
        return InputError(f"{repo}: the upload broke off ({line}): nothing was committed, try again")
    return error
