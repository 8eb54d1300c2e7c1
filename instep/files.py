"""Writing to disk so that a kill, a full disk or a lost mount never leaves a half-written file behind."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from instep.errors import InputError


def _explain(error: OSError, path: Path) -> InputError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return InputError(
            f"no space left on the disk while writing {path}: free some and run the command again"
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return InputError(f"no permission to write {path}: choose another place or change its rights")
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return InputError(f"cannot write {path}: a part of that path is a file where a folder is needed")
    return InputError(f"cannot write {path}: {error.strerror or error}")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the operating system's refusals inside the block into one InputError that names `path`."""
    try:
        yield
    except OSError as error:
        raise _explain(error, path) from error
    except SafetensorError as error:  # its writer wraps the system's error in text: "… (os error 28)"
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise _explain(OSError(int(number[1]), str(error)), path) from error


def sync_folder(folder: Path) -> None:
    """fsync a directory, so that renames inside it survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def refuse_output(path: Path, option: str, force: bool, inputs: Iterable[Path] = ()) -> None:
    """Refuse, before any work is done, an output file that could not be written or would cost the user something:
    a folder, a device or a link, one of the `inputs`, and any file that exists unless `force` is given."""
    if path.is_dir():
        raise InputError(f"{path} is a folder: give {option} the name of a file")
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise InputError(
            f"{path} is a link or a device and would be replaced: give {option} the name of a file"
        )
    if not path.exists():
        return
    if not force:
        raise InputError(f"{path} exists already: choose another name, or --force to replace it")
    if any(one.exists() and one.samefile(path) for one in inputs):
        raise InputError(f"{path} is read by this command and would be replaced by it: choose another name")


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write to a temporary file beside `path`, fsync, rename. Raises InputError where the disk refuses."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    data = content.encode("utf-8") if isinstance(content, str) else content
    with writing(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            sync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def replacing_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder to fill; on success it takes the place of `target`, otherwise it is removed.

    A folder cannot be renamed over another one, so the old one steps aside first: a process that is killed
    between the two renames leaves `<name>.new` complete, which `settle_folder` puts in its place.
    """
    new, old = target.with_name(target.name + ".new"), target.with_name(target.name + ".old")
    partial = target.with_name(target.name + ".partial")
    with writing(target):
        settle_folder(target)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            yield partial
            for file in partial.rglob("*"):
                if file.is_file():
                    with file.open("rb") as handle:
                        os.fsync(handle.fileno())
            sync_folder(partial)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        partial.rename(new)
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
            target.rename(old)
        new.rename(target)
        sync_folder(target.parent)
        shutil.rmtree(old, ignore_errors=True)


def settle_folder(target: Path) -> None:
    """Finish or undo a `replacing_folder` that was killed, so that `target` is whole if it ever was."""
    new, old = target.with_name(target.name + ".new"), target.with_name(target.name + ".old")
    if not target.exists():
        if new.exists():
            new.rename(target)
        elif old.exists():
            old.rename(target)
    elif new.exists():
        # The new one is complete but the swap had not begun.
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
        new.rename(target)
    shutil.rmtree(old, ignore_errors=True)
