"""Environment variables that PyTorch reads once, when it is imported. This module imports no framework.

MPS stops allocating at a high watermark that is a share of the recommended working set, and refuses a high
watermark below the low one; both must be 0 to lift the limit, and before `import torch`. The engine then
watches memory itself.
"""

from __future__ import annotations

import os
import sys

WATERMARKS = ("PYTORCH_MPS_HIGH_WATERMARK_RATIO", "PYTORCH_MPS_LOW_WATERMARK_RATIO")


def prepare() -> None:
    """Set the MPS rules on macOS, unless the user has set either of them: then both are the user's."""
    if sys.platform == "darwin" and not any(name in os.environ for name in WATERMARKS):
        for name in WATERMARKS:
            os.environ[name] = "0.0"
