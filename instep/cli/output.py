"""How commands speak: `--json` puts one object on stdout and nothing else there; people's text goes by rich."""

from __future__ import annotations

import json
import sys
from typing import Any


def emit_json(value: Any) -> None:
    """Print one JSON object on stdout."""
    json.dump(value, sys.stdout, ensure_ascii=False, allow_nan=False, default=str)
    sys.stdout.write("\n")
