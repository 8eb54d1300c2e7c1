"""A fully fine-tuned model as a Hugging Face folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from instep.engines.base import EngineState
from instep.errors import TrainingError
from instep.files import replacing_folder


def save_full_model(folder: Path, state: EngineState, base: Path) -> None:
    """Write the parameters in float32 beside the base's config and tokenizer, whole or not at all.

    Raises TrainingError where a value is not finite, InputError where the disk refuses.
    """
    broken = [name for name, value in state.parameters.items() if not np.isfinite(value).all()]
    if broken:
        raise TrainingError(f"{broken[0]} holds non-finite values: the model was not written")
    with replacing_folder(folder) as partial:
        for file in base.iterdir():
            if file.is_file() and ".safetensors" not in file.name and file.name != "config.json":
                shutil.copyfile(file, partial / file.name)
        config = json.loads((base / "config.json").read_text(encoding="utf-8"))
        config.pop("torch_dtype", None)
        config["dtype"] = "float32"
        (partial / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
        save_file(
            {name: np.ascontiguousarray(value, np.float32) for name, value in state.parameters.items()},
            partial / "model.safetensors",
            metadata={"format": "pt"},
        )
