"""Secrets, e-mail addresses and home directories out of conversations, before anything is written.

Secrets become typed placeholders such as `[REDACTED:aws-access-key]`, home directories `~`. Every text of a
conversation is looked at: messages, reasoning, tool arguments (keys too), schemas, ids, notes and provenance. The
same secret always becomes the same placeholder: one that is known only by what stands around it (a password in a
URL, a bearer header) is then replaced wherever it stands. An assistant turn that held a secret stays supervised:
the model is trained to write the placeholder there.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from instep.records import Conversation
from instep.sessions.secret_patterns import EMAIL, HOME, SECRET_NAMES, Pattern, is_secret_value, patterns
from instep.sessions.store import from_json, to_json

_SHORTEST = 4
"""No pattern can match in fewer characters."""
_SHORT = 64
_SHORTEST_EVERYWHERE = 12
"""A contextual secret shorter than this is replaced in its context only: `postgres` is a word, too."""
_PLACEHOLDER = re.compile(r"\[REDACTED:([a-z0-9-]+)\]")


def redact(conversations: Sequence[Conversation]) -> tuple[list[Conversation], Counter[str]]:
    """The conversations without secrets, and how many replacements were made by kind."""
    redactor = Redactor()
    values = [to_json(conversation) for conversation in conversations]
    for value in values:
        redactor.learn(value)
    return [from_json(redactor.value(value), "redacted conversation") for value in values], redactor.counts


def placeholders(conversations: Sequence[Conversation]) -> Counter[str]:
    """Placeholders by kind in conversations that were redacted before."""
    counts: Counter[str] = Counter()
    for conversation in conversations:
        for text in _texts(to_json(conversation)):
            counts.update(_PLACEHOLDER.findall(text))
    return counts


def placeholder(kind: str) -> str:
    return f"[REDACTED:{kind}]"


class Redactor:
    """Learn from all values first, then replace in each."""

    def __init__(self, home: Path | None = None) -> None:
        self.counts: Counter[str] = Counter()
        self._secrets: dict[str, str] = {}
        self._names: set[str] = set()
        self._clean: set[str] = set()
        self._everywhere: re.Pattern[str] | None = None
        self._encoded_home: re.Pattern[str] | None = None
        self._home = str(home or Path.home())
        # Not `/` or `/root`: a home that names nobody.
        self._home_pattern = (
            re.compile(re.escape(self._home) + r"(?![\w-])") if self._home.count("/") >= 2 else None
        )

    def learn(self, value: Any) -> None:
        """Take in the secrets that only their surroundings give away, and the names of home directories."""
        for text in _texts(value):
            for match in HOME.finditer(text) if _may_hold_home(text) else ():
                # A value that is such a path and nothing else (a working directory) is one, too.
                if _certainly_home(match) or match[0] == text:
                    self._names.add(_name_of(match))
            for pattern in patterns():
                if pattern.contextual and any(hint in text for hint in pattern.hints):
                    for match in pattern.regex.finditer(text):
                        self._keep(match["value"], pattern)
        for text in _named_secrets(value):
            if len(text) >= _SHORTEST_EVERYWHERE:
                self._secrets.setdefault(text, "password-field")
        self._everywhere = self._encoded_home = None
        self._clean.clear()

    def _keep(self, value: str, pattern: Pattern) -> None:
        long = len(value) >= _SHORTEST_EVERYWHERE
        if long and pattern.accept(value) and is_secret_value(value):
            self._secrets.setdefault(value, pattern.kind)

    def value(self, value: Any) -> Any:
        """The JSON value with every text in it redacted."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.value(item) for item in value]
        if isinstance(value, dict):
            return {self.text(key): self._member(key, item) for key, item in value.items()}
        return value

    def _member(self, key: str, item: Any) -> Any:
        if isinstance(item, list) and SECRET_NAMES.match(key):
            return [self._member(key, one) for one in item]
        if isinstance(item, str) and SECRET_NAMES.match(key) and len(item) >= 8 and is_secret_value(item):
            redacted = self.text(item)
            if redacted != item:
                return redacted
            self.counts["password-field"] += 1
            return placeholder("password-field")
        return self.value(item)

    def text(self, text: str) -> str:
        """One text redacted."""
        if len(text) < _SHORTEST or text in self._clean:
            return text
        redacted = self._redacted(text)
        if redacted == text and len(text) <= _SHORT:
            self._clean.add(text)  # roles, names and keys come again and again
        return redacted

    def _redacted(self, text: str) -> str:
        for pattern in patterns():
            if any(hint in text for hint in pattern.hints):
                text = pattern.regex.sub(self._replacer(pattern), text)
        if self._secrets:
            self._everywhere = self._everywhere or _any_of(self._secrets)
            text = self._everywhere.sub(self._known, text)
        if "@" in text:
            text = EMAIL.sub(self._email, text)
        return self._without_homes(text)

    def _replacer(self, pattern: Pattern) -> Callable[[re.Match[str]], str]:
        named = "value" in pattern.regex.groupindex

        def replace(match: re.Match[str]) -> str:
            group = "value" if named else 0
            if not pattern.accept(match[group]):
                return match[0]
            self.counts[pattern.kind] += 1
            start, end = match.start(group) - match.start(), match.end(group) - match.start()
            return match[0][:start] + placeholder(pattern.kind) + match[0][end:]

        return replace

    def _known(self, match: re.Match[str]) -> str:
        kind = self._secrets[match[0]]
        self.counts[kind] += 1
        return placeholder(kind)

    def _email(self, match: re.Match[str]) -> str:
        self.counts["email"] += 1
        return placeholder("email")

    def _without_homes(self, text: str) -> str:
        if self._home_pattern is not None and self._home in text:
            text, count = self._home_pattern.subn("~", text)
            self.counts["home-directory"] += count
        if _may_hold_home(text):
            text = HOME.sub(self._home_directory, text)
        if self._names and ("-Users-" in text or "-home-" in text):
            # Agents name a session's folder after its path: --Users-anna-code-- .
            if self._encoded_home is None:
                names = "|".join(sorted(map(re.escape, self._names), key=len, reverse=True))
                self._encoded_home = re.compile(rf"(?<=-)(?:Users|home)-(?:{names})(?![A-Za-z0-9])")
            text, count = self._encoded_home.subn("~", text)
            self.counts["home-directory"] += count
        return text

    def _home_directory(self, match: re.Match[str]) -> str:
        name = _name_of(match)
        # `/home/dashboard` may be a route: without a slash behind it, only a name met as a directory counts.
        if name in ("Shared", "Public") or not (_certainly_home(match) or name in self._names):
            return match[0]
        self.counts["home-directory"] += 1
        return "~"


def _certainly_home(match: re.Match[str]) -> bool:
    return bool(match["windows"] or match["escaped"] or match["mac"] or match["slash"] is not None)


def _may_hold_home(text: str) -> bool:
    return "Users" in text or "/home/" in text or "Fhome%2" in text or "fhome%2" in text


def _name_of(match: re.Match[str]) -> str:
    return match["unix"] or match["windows"] or match["escaped"]


def _any_of(secrets: dict[str, str]) -> re.Pattern[str]:
    # Longest first: a secret may hold another one.
    return re.compile("|".join(re.escape(secret) for secret in sorted(secrets, key=len, reverse=True)))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _texts(item)


def _named_secrets(value: Any) -> Iterator[str]:
    if isinstance(value, list):
        for item in value:
            yield from _named_secrets(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            for one in item if isinstance(item, list) else [item]:
                if isinstance(one, str) and SECRET_NAMES.match(key) and is_secret_value(one):
                    yield one
                else:
                    yield from _named_secrets(one)
