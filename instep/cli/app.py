"""The command line: mounts the commands and turns InputError into one line and exit code 2.

Command modules import what they need inside their functions, so that `instep --help` stays fast.
"""

from __future__ import annotations

import sys

import typer

from instep import __version__
from instep.cli import (
    adapter,
    chat,
    convert,
    data,
    evaluate,
    generate,
    grpo,
    plan,
    quickstart,
    runs,
    selftest,
    sft,
    stages,
)
