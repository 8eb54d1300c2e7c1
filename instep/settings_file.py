"""From a TOML file (or a shipped recipe's name), INSTEP_CONFIG and `--set a.b=c` to one validated tree.

Precedence, lowest first: defaults of config.py, the file, `--set`, the command's own flags.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
from pydantic import BaseModel, ValidationError

from instep.config import Settings
from instep.errors import InputError

Tree = TypeVar("Tree", bound=Settings)


def load_settings(
    kind: type[Tree],
    source: str | None = None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    base: Mapping[str, Any] | None = None,
) -> Tree:
    """Validated settings of type `kind`.

    source     TOML path or recipe name; without it the environment's INSTEP_CONFIG, without that the defaults
    overrides  "a.b=c" with c in TOML (a bare word is taken as a string)
    flags      dotted name → value of the command's own options; None means not given
    base       settings below the file, such as those of a run; INSTEP_CONFIG is not read where it is given
    Raises InputError that names the setting, what was found and what was expected.
    """
    source = source or (os.environ.get("INSTEP_CONFIG") if base is None else None) or None
    tree = merge(base or {}, read_tree(source) if source else {})
    for name, value in parse_overrides(overrides).items():
        put(tree, name, value)
    for name, value in (flags or {}).items():
        if value is not None:
            put(tree, name, value)
    where = source or "the command line"
    settings = validate(kind, tree, where)
    for unused, reason in unused_settings(kind, tree):
        raise InputError(f"{where}: {unused} is set but would not be used: {reason}; remove one of them")
    return settings


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """`["a.b=1"]` → `{"a.b": 1}`. Raises InputError for one that is not name=value."""
    values: dict[str, Any] = {}
    for override in overrides:
        name, found, text = override.partition("=")
        if not found or not name.strip():
            raise InputError(f"--set {override!r}: expected name=value, such as --set adapter.rank=8")
        values[name.strip()] = _value(text.strip())
    return values


def unused_settings(kind: type[Settings], tree: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Settings given by the user that another one given with them makes meaningless: (name, reason).

    One that is given its default is let pass: a run's own config.toml holds every setting.
    """
    given = dict(flatten(tree))
    for name, reason in _meaningless(given):
        if name in given and given[name] != _default(kind, name):
            yield name, reason


def _meaningless(given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if given.get("adapter.kind") == "full":
        for name in ("adapter.rank", "adapter.alpha", "adapter.target_modules"):
            yield name, "adapter.kind is 'full'"
    if "data.validation_path" in given:
        yield "data.validation_share", "data.validation_path is set"
    if not given.get("samples"):
        yield "temperature", "samples is 0"
    if given.get("optimizer.schedule") == "constant":
        yield "optimizer.final_share", "optimizer.schedule is 'constant'"


def _default(kind: type[BaseModel], name: str) -> Any:
    """The default of a dotted name, as TOML would have it."""
    *parents, last = name.split(".")
    for parent in parents:
        inner = kind.model_fields[parent].annotation
        assert isinstance(inner, type) and issubclass(inner, BaseModel)
        kind = inner
    default = kind.model_fields[last].default
    return list(default) if isinstance(default, tuple) else default


def dump_settings(settings: Settings) -> str:
    """The resolved tree as TOML that `load_resolved` reads back to an equal value."""
    return tomli_w.dumps(settings.model_dump(mode="json", exclude_none=True))


def load_resolved(kind: type[Tree], path: Path) -> Tree:
    """Read back what `dump_settings` wrote. Raises InputError where the file was damaged."""
    return validate(kind, read_tree(str(path)), str(path))


def validate(kind: type[Tree], tree: Mapping[str, Any], where: str) -> Tree:
    """The tree as settings. Raises InputError that names the first wrong one."""
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        raise InputError(_explain(kind, error, where)) from None


def recipes() -> dict[str, Any]:
    """Shipped recipes: name → resource."""
    folder = resources.files("instep") / "recipes"
    return {item.name[:-5]: item for item in folder.iterdir() if item.name.endswith(".toml")}


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Both trees in one; where both have a value, that of `above`."""
    merged: dict[str, Any] = {}
    for key in (*below, *above):
        low, high = below.get(key), above.get(key)
        if isinstance(low, Mapping) and isinstance(high, Mapping):
            merged[key] = merge(low, high)
        else:
            value = above.get(key, low)
            merged[key] = merge({}, value) if isinstance(value, Mapping) else value
    return merged


def read_tree(source: str) -> dict[str, Any]:
    """The settings of a TOML file or shipped recipe (`gsm8k` or `recipes/gsm8k.toml`), not validated."""
    path = Path(source)
    shipped = recipes()
    name = source.removeprefix("recipes/").removesuffix(".toml")
    try:
        if not path.exists() and name in shipped:
            text = shipped[name].read_text(encoding="utf-8")
        else:
            text = path.read_text(encoding="utf-8")
        return tomllib.loads(text)
    except FileNotFoundError:
        known = ", ".join(sorted(shipped)) or "none"
        raise InputError(
            f"settings {source!r} not found: expected a TOML file or the name of a shipped recipe ({known})"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"settings {source!r} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"settings {source!r} are not valid TOML: {error}") from None


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def put(tree: dict[str, Any], name: str, value: Any) -> None:
    """Set the value of a dotted name."""
    *parents, last = name.split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            raise InputError(f"setting {name!r}: {parent!r} is a value, not a section")
    tree[last] = value


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of a tree by dotted names."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def setting_names(kind: type[BaseModel], prefix: str = "") -> list[str]:
    """Dotted names of every setting in the tree."""
    names: list[str] = []
    for name, field in kind.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            names += setting_names(inner, f"{prefix}{name}.")
        else:
            names.append(f"{prefix}{name}")
    return names


def _explain(kind: type[BaseModel], error: ValidationError, where: str) -> str:
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"])
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if first["type"] == "extra_forbidden":
        names = setting_names(kind)
        near = difflib.get_close_matches(name, names, 3, 0.5) or difflib.get_close_matches(
            name.rpartition(".")[2], [n.rpartition(".")[2] for n in names], 3, 0.6
        )
        full = [n for n in names if n in near or n.rpartition(".")[2] in near]
        hint = "did you mean " + " or ".join(full[:3]) if full else "known settings: " + ", ".join(names)
        return f"{where}: unknown setting {name!r}{more}: {hint}"
    message = first["msg"].removeprefix("Value error, ")
    subject = f"{name} = {first['input']!r}: " if name else ""
    return f"{where}: {subject}{message}{more}"
