"""Which files there are to read, and their bytes, or the reason why a file is no session."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from instep.errors import InputError

_SNIFF_BYTES = 1 << 16
_OBJECT_AT_LINE_START = re.compile(rb"(?:^|\n)[\s\0\xef\xbb\xbf]*\{")
_SKIPPED_FOLDERS = {".git", "node_modules", "__pycache__"}


def find_files(sources: Sequence[Path]) -> list[Path]:
    """Every regular file named or below a folder named, each once, in a fixed order.

    Raises InputError for a source that does not exist.
    """
    files: list[Path] = []
    seen: set[str] = set()
    for source in sources:
        if not source.exists():
            raise InputError(f"{source} does not exist: give session files, or folders that hold them")
        for file in [source] if not source.is_dir() else _walk(source):
            resolved = os.path.realpath(file)  # unlike Path.resolve, it does not stop at a loop of links
            if resolved not in seen and (file.is_file() or not source.is_dir()):
                seen.add(resolved)
                files.append(file)
    return files


def _walk(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED_FOLDERS)
        yield from (Path(parent) / name for name in sorted(names))


def read_bytes(path: Path) -> tuple[bytes, str | None]:
    """The bytes of the file, or no bytes and the reason. Large files that hold no JSON are not read whole."""
    try:
        if not path.is_file():
            return b"", "not a regular file"
        with path.open("rb") as file:
            head = file.read(_SNIFF_BYTES)
            if not head.strip(b"\0 \t\r\n"):
                rest = file.read()
                if not rest.strip(b"\0 \t\r\n"):
                    return b"", "empty"
                return head + rest, None
            if not _OBJECT_AT_LINE_START.search(head):
                return b"", "binary" if looks_binary(head) else "not JSONL"
            return head + file.read(), None
    except OSError as error:
        return b"", f"unreadable ({error.strerror or 'read error'})"


def looks_binary(head: bytes) -> bool:
    """NUL or invalid UTF-8 near the start; a character cut by the end of `head` does not count."""
    if b"\0" in head:
        return True
    try:
        head[:-4].decode("utf-8") if len(head) > 4 else head.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.end < len(head) - 8
    return False
