"""Reward functions of a user's own Python file, loaded and run in a worker process.

A reward function is

    def brevity(prompts, completions, messages, columns):
        return [1.0 if len(text) < 200 else None for text in completions]

    prompts      list of str: the last user message of each sample
    completions  list of str: what the model wrote
    messages     list of lists of {"role", "content"}: each sample's whole prompt
    columns      dict of lists, one item a sample: answer, task, completion_tokens, truncated, tools, and every
                 extra column of the task
    returns      one float a sample, or None where the reward does not apply

It is called with these four by name, once for all samples of a step.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

PARAMETERS = ("prompts", "completions", "messages", "columns")
_loaded: dict[tuple[str, str], Callable[..., Any]] = {}


class Refused(Exception):
    """The file or the function cannot be used as a reward; the text says why."""


def load(path: str, name: str) -> None:
    """Import the file and check the function. Raises Refused, or whatever the file itself raises."""
    file = Path(path)
    spec = importlib.util.spec_from_file_location(f"rewards_of_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise Refused("is not a Python file (its name must end in .py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(file.parent))  # so that the file can import what lies beside it
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        names = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise Refused(f"has no function {name!r}; it has {', '.join(sorted(names)) or 'none'}")
    if inspect.iscoroutinefunction(function):
        raise Refused(f"{name} is async; a plain function is needed")
    try:
        inspect.signature(function).bind(**dict.fromkeys(PARAMETERS))
    except TypeError as error:
        raise Refused(
            f"{name}{inspect.signature(function)} cannot be called as {name}({', '.join(PARAMETERS)}): {error}"
        ) from error
    _loaded[path, name] = function


def call(path: str, name: str, arguments: dict[str, Any]) -> list[Any]:
    """Run a function for which `load` was called in this process, or call `load` first."""
    if (path, name) not in _loaded:
        load(path, name)
    result = _loaded[path, name](**arguments)
    if isinstance(result, str | bytes | dict) or not isinstance(result, Iterable):
        raise Refused(f"returned a {type(result).__name__}; expected a list of one float or None a sample")
    # Plain numbers only cross over, so that the other process needs none of the libraries used here.
    return [_plain(value) for value in result]


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str | bytes):
        raise Refused(f"returned {value!r} for a sample; expected a float or None")
    try:
        return float(value)
    except (TypeError, ValueError):
        raise Refused(f"returned a {type(value).__name__} for a sample; expected a float or None") from None
