"""Which device, which precision and why; weights from safetensors straight to the device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from instep.config import ModelSettings
from instep.engines.torch.attention import IMPLEMENTATION, register
from instep.errors import InputError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(wanted: str) -> tuple[torch.device, str]:
    """The device and the reason for it. Raises InputError where the one asked for is not there."""
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if wanted != "auto":
        if not there[wanted]:
            have = ", ".join(name for name, ok in there.items() if ok)
            raise InputError(
                f"device {wanted!r} is not on this machine (there is: {have}); set model.device = 'auto'"
            )
        return torch.device(wanted), "asked for"
    if there["cuda"]:
        return torch.device("cuda"), f"{torch.cuda.get_device_name()} found"
    if there["mps"]:
        return torch.device("mps"), "Apple GPU found"
    return torch.device("cpu"), "no GPU found"


def _cpu_has_bfloat16() -> tuple[bool, str]:
    if torch.cpu._is_amx_tile_supported():
        return True, "the CPU multiplies bfloat16 in AMX tiles"
    if torch.cpu._is_avx512_bf16_supported():
        return True, "the CPU has AVX512-BF16"
    return False, "the CPU has no fast bfloat16 product"


def choose_precision(wanted: str, device: torch.device) -> tuple[torch.dtype, str]:
    """Data type of the frozen base and of activations, and the reason for it."""
    if wanted != "auto":
        return DTYPES[wanted], "asked for"
    if device.type == "cpu":
        fast, reason = _cpu_has_bfloat16()
        return (torch.bfloat16 if fast else torch.float32), reason
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return torch.bfloat16, "the GPU has bfloat16"
        return torch.float32, "the GPU has no bfloat16, and float16 gradients overflow without loss scaling"
    try:
        probe = torch.ones(2, 2, dtype=torch.bfloat16, device=device)
        torch.mm(probe, probe).sum().item()
    except (RuntimeError, TypeError) as error:
        return torch.float16, f"this macOS has no bfloat16 on MPS ({type(error).__name__})"
    return torch.bfloat16, "this macOS has bfloat16 on MPS"


def _model_folder(path: str) -> Path:
    folder = Path(path).expanduser()
    config = folder / "config.json"
    if not config.is_file():
        raise InputError(f"{path} is not a model: expected a folder with config.json and *.safetensors")
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{config} is not readable as JSON ({error}): fetch the model again") from error
    if not isinstance(content, dict) or "model_type" not in content:
        raise InputError(f"{config} names no model_type: expected the config.json of a Hugging Face model")
    if not list(folder.glob("*.safetensors")):
        raise InputError(
            f"{path} has no *.safetensors: convert the weights to safetensors, or fetch them again"
        )
    return folder


def load_model(settings: ModelSettings, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """A causal language model of the local folder, its weights read once, straight to the device.

    Raises InputError where the folder is no text model that transformers knows, or its weights do not fit it.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    folder = _model_folder(settings.path)
    register()
    logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            device_map={"": device} if device.type != "cpu" else None,
            attn_implementation=IMPLEMENTATION,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except torch.OutOfMemoryError:
        raise
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        ImportError,
        RuntimeError,
        SafetensorError,
    ) as error:
        line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(f"{settings.path} is not a model that the torch engine can run: {line}") from error
    model, info = loaded
    missing = sorted(info.get("missing_keys") or ())
    if missing:
        raise InputError(
            f"{settings.path}: {len(missing)} weights that the model needs are not in its files, such as "
            f"{missing[0]}: the files belong to another architecture or are incomplete"
        )
    if getattr(model, "get_decoder", None) is None or model.get_output_embeddings() is None:
        raise InputError(
            f"{settings.path} is {type(model).__name__}: expected a causal text model with an LM head"
        )
    model.eval()
    model.requires_grad_(False)
    model.config.use_cache = False
    return model
