"""GGUF and Ollama: what another reader makes of the file is what the model says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from instep.errors import InputError
from instep.loops.prompts import prompt_renderer
from instep.publishing.gguf_model import rope_factors, write_gguf
from instep.publishing.gguf_tokenizer import split_name
from instep.publishing.modelfile import read_frames, write_modelfile

IDS = [[0, 5, 17, 40, 41, 42, 99, 12, 7, 3]]


def _model(family: str, folder: Path, tokenizer: Any) -> Path:
    """A random two-layer model whose heads are not hidden_size / heads wide, and whose biases are not zero."""
    from transformers import AutoModelForCausalLM
    from transformers.models.llama import LlamaConfig
    from transformers.models.qwen2 import Qwen2Config
    from transformers.models.qwen3 import Qwen3Config

    kind: Any = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}[family]
    # transformers' reader takes Qwen 3's heads to be 128 wide, as all published ones are.
    more = {"llama": {"head_dim": 32}, "qwen2": {}, "qwen3": {"head_dim": 128}}[family]
    config = kind(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, rope_theta=50_000.0, rms_norm_eps=1e-5,
        tie_word_embeddings=family != "llama", bos_token_id=0, eos_token_id=2, **more,
    )  # fmt: skip
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_transformers_reads_the_same_model_back(family: str, tiny_model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_model)
    folder = _model(family, tmp_path / "model", tokenizer)
    write_gguf(folder, tmp_path / "m.gguf", tokenizer, "f32", "tiny")
    original: Any = AutoModelForCausalLM.from_pretrained(folder)
    back: Any = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    with torch.no_grad():
        ours, theirs = (model(torch.tensor(IDS)).logits for model in (original, back))
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4)
    read: Any = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    text = "<|im_start|>user\ncount to ten and say wörter 日本<|im_end|>\n"
    assert read.encode(text, add_special_tokens=False) == tokenizer.encode(text, add_special_tokens=False)
    assert read.chat_template == tokenizer.chat_template


def test_a_runs_adapter_is_in_the_file(
    instep: Any, trained_run: Path, tiny_model: Path, tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    done = instep("export", trained_run, "--to", "gguf", "-o", "out.gguf", "--precision", "f32", "--json")
    assert json.loads(done.stdout)["bytes"] == (tmp_path / "out.gguf").stat().st_size
    assert [path.name for path in tmp_path.iterdir()] == ["out.gguf"]
    base: Any = AutoModelForCausalLM.from_pretrained(tiny_model)
    adapted: Any = PeftModel.from_pretrained(base, str(trained_run / "adapter"))
    exported: Any = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="out.gguf", dtype=torch.float32)
    with torch.no_grad():
        ours, theirs = (model(torch.tensor(IDS)).logits for model in (adapted, exported))
    torch.testing.assert_close(theirs, ours, rtol=1e-3, atol=1e-3)
    assert "exists already" in instep("export", trained_run, "--to", "gguf", "-o", "out.gguf", check=2).stderr


def test_f16_halves_the_matrices_and_keeps_the_vectors(tiny_model: Path, tmp_path: Path) -> None:
    import gguf

    tokenizer = prompt_renderer(tiny_model).tokenizer
    write_gguf(tiny_model, tmp_path / "m.gguf", tokenizer, "f16", "tiny")
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert kinds["blk.0.attn_q.weight"] == "F16" and kinds["output_norm.weight"] == "F32"


def test_llama_3_scaling_is_that_of_transformers() -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama import LlamaConfig

    rope = {
        "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    config = LlamaConfig(hidden_size=2048, num_attention_heads=32, head_dim=64, rope_parameters=rope)
    scaled = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0].numpy()
    plain = 1.0 / 500_000.0 ** (np.arange(0, 64, 2) / 64)
    factors = rope_factors(config.to_dict())
    assert factors is not None and factors.max() == pytest.approx(8.0) and factors.min() == 1.0
    np.testing.assert_allclose(plain / factors, scaled, rtol=1e-5)
    assert rope_factors({"head_dim": 64, "rope_theta": 1e4}) is None


def test_the_modelfile_frames_messages_as_the_template_does(tiny_model: Path) -> None:
    renderer = prompt_renderer(tiny_model)
    frames = read_frames(renderer)
    assert frames.user == ("<|im_start|>user\n", "<|im_end|>\n")
    assert frames.assistant == ("<|im_start|>assistant\n", "<|im_end|>\n") and frames.default_system is None
    text = write_modelfile("model.gguf", renderer, adds_bos=False)
    assert text.startswith("FROM ./model.gguf\n") and 'PARAMETER stop "<|im_end|>"' in text
    assert _go(text, [("user", "One?"), ("assistant", "1"), ("user", "Two?")]) == frames.write(
        [("user", "One?"), ("assistant", "1"), ("user", "Two?")]
    )


def _go(modelfile: str, messages: list[tuple[str, str]]) -> str:
    """What Go's text/template makes of the Modelfile's TEMPLATE, for the few actions that are used in it."""
    template = modelfile.split('TEMPLATE """')[1].split('"""')[0]
    begin, rest = template.split("{{ range $i, $m := .Messages }}")
    loop, after = rest.split("{{ end }}{{ end }}")
    branches: dict[str, str] = {}
    for part in loop.replace("{{ else if ", "{{ if ").split("{{ if eq $m.Role ")[1:]:
        role, body = part.split(" }}", 1)
        branches[role.strip('"')] = body
    return (
        begin + "".join(branches[role].replace("{{ $m.Content }}", said) for role, said in messages) + after
    )


def test_a_default_system_prompt_is_kept(tiny_model: Path) -> None:
    renderer = prompt_renderer(tiny_model)
    plain = renderer.tokenizer.chat_template
    renderer.tokenizer.chat_template = (
        "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}" + plain
    )
    assert read_frames(renderer).default_system == "You help."
    assert 'SYSTEM """You help."""' in write_modelfile("m.gguf", renderer, adds_bos=False)
    renderer.tokenizer.chat_template = plain.replace("message['content']", "message['content'] | upper")
    with pytest.raises(InputError, match="--to gguf"):
        read_frames(renderer)


def test_ollama_folder(instep: Any, trained_run: Path, tmp_path: Path) -> None:
    done = instep("export", trained_run, "--to", "ollama", "-o", "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"model.gguf", "Modelfile"}
    assert "ollama create out" in done.stdout


@pytest.mark.parametrize(
    ("pre", "name"),
    [
        ({"type": "ByteLevel", "use_regex": True}, "gpt-2"),
        (
            {
                "type": "Sequence",
                "pretokenizers": [
                    {"type": "Digits", "individual_digits": True},
                    {"type": "ByteLevel", "use_regex": True},
                ],
            },
            "smollm",
        ),
        ({"type": "Whitespace"}, None),
        (None, None),
        (
            {
                "type": "Sequence",
                "pretokenizers": [
                    {"type": "Split", "pattern": {"Regex": "unknown"}, "behavior": "Isolated"},
                    {"type": "ByteLevel", "use_regex": False},
                ],
            },
            None,
        ),
    ],
)
def test_how_text_is_split_has_a_name_or_is_refused(pre: Any, name: str | None) -> None:
    if name is not None:
        assert split_name(pre, Path("tokenizer.json")) == name
        return
    with pytest.raises(InputError, match="pre-tokenizer"):
        split_name(pre, Path("tokenizer.json"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--to", "exe", "-o", "x"), "expected one of gguf"),
        (("--to", "gguf", "-o", "x.bin"), "ends in .gguf"),
        (("--to", "gguf", "-o", "x.gguf", "--precision", "q4"), "f16 or f32"),
    ],
)
def test_wrong_input_is_one_line(
    instep: Any, trained_run: Path, arguments: tuple[str, ...], words: str
) -> None:
    line = instep("export", trained_run, *arguments, check=2).stderr
    assert words in line and len(line.strip().splitlines()) == 1
