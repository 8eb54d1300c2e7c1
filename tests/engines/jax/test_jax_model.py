"""Reading of models, attention, head and NF4 against transformers and plain arithmetic."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from batches import batch, samples
from jax_engines import engine

from instep.config import AdapterSettings, ModelSettings, OptimizerSettings
from instep.engines.jax import nf4
from instep.engines.jax.attention import Grid, Places, attend
from instep.engines.jax.engine import JaxEngine
from instep.engines.jax.families import read_architecture
from instep.engines.jax.head import HeadSpec, site_logprob
from instep.errors import InputError
from instep.objectives import CrossEntropy

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
GEMMA_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}
VARIANTS = [
    ("llama", {}),
    ("llama", {"rope_parameters": LLAMA3}),
    ("llama", {"attention_bias": True, "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 9e3}}),
    ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 77_000.0}}),
    ("gemma3_text", {"rope_parameters": GEMMA_ROPES}),
    ("gemma3_text", {"final_logit_softcapping": 3.0, "num_hidden_layers": 3, "layer_types": None}),
]  # fmt: skip


def reference(folder, rows):
    """Log-probabilities at the supervised tokens by transformers' eager attention, each sample alone."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    out = []
    for ids, weight in (s for row in rows for s in row):
        with torch.no_grad():
            logits = model(torch.from_numpy(ids).long()[None]).logits[0]
        logprob = torch.log_softmax(logits, -1)
        out += [float(logprob[t - 1, ids[t]]) for t in np.flatnonzero(weight)]
    return np.array(out)


def load(folder, **model):
    made = JaxEngine()
    settings = ModelSettings(path=str(folder), device="cpu", **model)
    return made, made.load(settings, AdapterSettings(rank=4, alpha=8.0), OptimizerSettings(), 0)


@pytest.mark.parametrize(("name", "overrides"), VARIANTS)
def test_every_family_equals_transformers(tmp_path, name, overrides):
    folder = models.make(name, tmp_path, **overrides)
    rows = [samples([9, 30]), samples([41], 2)]
    made, _ = load(folder)
    theirs = reference(folder, rows)
    ours = made.score(batch(rows, 48, sites=64)).logprob[: len(theirs)]
    np.testing.assert_allclose(ours, theirs, atol=2e-5)


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_older_configs_mean_the_same(family, tmp_path, name):
    """rope_theta, rope_local_base_freq and rope_scaling at the top, as transformers 4 wrote them."""
    folder = models.make(
        name, tmp_path, rope_parameters=GEMMA_ROPES if name == "gemma3_text" else LLAMA3
    )  # fmt: skip
    new = read_architecture(str(folder))
    config = json.loads((folder / "config.json").read_text())
    parameters = config.pop("rope_parameters")
    if name == "gemma3_text":
        full = parameters["full_attention"]
        config["rope_theta"] = full["rope_theta"]
        config["rope_scaling"] = {"type": full["rope_type"], "factor": full["factor"]}
        config["rope_local_base_freq"] = parameters["sliding_attention"]["rope_theta"]
    else:
        config["rope_theta"] = parameters.pop("rope_theta")
        config["rope_scaling"] = parameters
    (folder / "config.json").write_text(json.dumps(config))
    assert read_architecture(str(folder)) == new


def test_shards_and_multimodal_names(family, tmp_path):
    """A Gemma-3 with a picture tower: text_config, language_model. in its names, several files."""
    import shutil

    from safetensors.numpy import load_file, save_file

    plain = family("gemma3_text")
    folder = tmp_path / "multimodal"
    shutil.copytree(plain, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": config}))
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for part, chosen in enumerate((names[::2], names[1::2])):
        file = f"model-{part}.safetensors"
        save_file({f"language_model.{name}": tensors[name] for name in chosen}, folder / file)
        weight_map |= {f"language_model.{name}": file for name in chosen}
    save_file({"vision_tower.q_proj.weight": np.zeros((2, 2), np.float32)}, folder / "tower.safetensors")
    weight_map["vision_tower.q_proj.weight"] = "tower.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    rows = batch([samples([9, 30])], 48)
    made, _ = load(folder)
    np.testing.assert_array_equal(made.score(rows).logprob, load(plain)[0].score(rows).logprob)
    assert all(
        name.startswith("base_model.model.model.language_model.layers.") for name in made.state().parameters
    )
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(InputError, match=r"model-1\.safetensors"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("llama", "hidden_act", "gelu"),
        ("llama", "mlp_bias", True),
        ("llama", "rope_scaling", {"rope_type": "yarn", "factor": 2.0}),
        ("llama", "partial_rotary_factor", 0.5),
        ("llama", "quantization_config", {"bits": 4}),
        ("llama", "model_type", "mamba"),
        ("llama", "num_hidden_layers", 0),
        ("gemma3_text", "attn_logit_softcapping", 50.0),
        ("gemma3_text", "use_bidirectional_attention", True),
        ("gemma3_text", "layer_types", ["full_attention"]),
    ],
)
def test_what_is_not_supported_is_named(family, tmp_path, name, field, value):
    config = json.loads((family(name) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(InputError, match=field) as caught:
        read_architecture(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_what_is_not_a_model_is_one_clear_line(family, tmp_path):
    good = family("llama")
    for name, files in {
        "empty": {},
        "torn": {"config.json": b"{"},
        "bare": {"config.json": (good / "config.json").read_bytes()},
        "broken": {"config.json": (good / "config.json").read_bytes(), "model.safetensors": b"nothing"},
        "cut": {
            "config.json": (good / "config.json").read_bytes(),
            "model.safetensors": (good / "model.safetensors").read_bytes()[:-100],
        },
    }.items():
        (tmp_path / name).mkdir()
        for file, content in files.items():
            (tmp_path / name / file).write_bytes(content)
        with pytest.raises(InputError) as caught:
            load(tmp_path / name)
        assert "\n" not in str(caught.value) and name in str(caught.value)
    config = json.loads((good / "config.json").read_text()) | {"intermediate_size": 50}
    (tmp_path / "bare" / "config.json").write_text(json.dumps(config))
    (tmp_path / "bare" / "model.safetensors").write_bytes((good / "model.safetensors").read_bytes())
    with pytest.raises(InputError, match=r"gate_proj.*\[48, 32\], expected \[50, 32\]"):
        load(tmp_path / "bare")


def test_settings_that_cannot_be_honoured_are_refused(family):
    settings = ModelSettings(path=str(family("llama")), device="cpu")
    for model, adapter, said in (
        (
            settings,
            AdapterSettings(target_modules=("q_proj", "qkv_proj")),
            r"qkv_proj .*down_proj, gate_proj",
        ),
        (settings, AdapterSettings(kind="full"), "full"),
        (settings.model_copy(update={"quantization": "8bit"}), AdapterSettings(), "8bit"),
        (settings.model_copy(update={"device": "tpu"}), AdapterSettings(), "tpu"),
    ):
        with pytest.raises(InputError, match=said):
            JaxEngine().load(model, adapter, OptimizerSettings(), 0)


def test_foreign_state_and_ids_are_refused(family):
    made = engine(family("llama"))
    state = made.state()
    state.parameters.pop(next(iter(state.parameters)))
    with pytest.raises(InputError, match="missing"):
        made.load_state(state)
    packed = batch([samples([9])], 16)
    packed.tokens[0, 0] = 97
    with pytest.raises(InputError, match="vocabulary"):
        made.score(packed)


def test_the_reference_model_is_the_base(family):
    packed = batch([samples([9, 30])], 48)
    warm, cold = engine(family("llama")), engine(family("llama"), warm=False)
    base = cold.score(packed).logprob
    np.testing.assert_allclose(warm.score(packed, adapter=False).logprob, base, atol=1e-6)
    assert np.abs(warm.score(packed).logprob - base).max() > 1e-3


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("kernel", ["plain", "xla"])
def test_long_rows_equal_a_naive_softmax_in_values_and_gradients(family, kernel, window):
    """More tokens than a block of queries has, two segments a row, a shared prefix that is padded, mixed kinds."""
    import dataclasses

    shape = read_architecture(str(family("gemma3_text")))
    kinds = (
        dataclasses.replace(shape.kinds[0], window=window),
        dataclasses.replace(shape.kinds[1], window=None),
    )
    shape = dataclasses.replace(shape, kinds=kinds, heads=4, kv_heads=2, head_dim=8)
    grid, real = Grid(2, 600, 64, True), 50
    rng = np.random.default_rng(0)
    segment = np.repeat([[1, 2], [1, 0]], 300, 1).astype(np.int32)
    position = (np.tile(np.arange(300), (2, 2)) + real).astype(np.int32)
    places = Places(jnp.asarray(segment), jnp.asarray(position), jnp.int32(real))
    q, k, v = (jnp.asarray(rng.standard_normal((grid.tokens, h, 8)), jnp.float32) for h in (4, 2, 2))
    cotangent = rng.standard_normal(q.shape).astype(np.float32)
    cotangent[real : grid.prefix] = 0  # nothing reads the places behind the prefix
    row = np.concatenate([np.zeros(64, int), np.repeat([1, 2], 600)])
    owner = np.concatenate([np.zeros(64, int), segment.ravel()])
    place = np.concatenate([np.arange(64), position.ravel()])
    index = np.arange(grid.tokens)
    in_prefix = (row == 0) & (index < real)
    seen = ((row[:, None] == row) & (owner[:, None] == owner) & (index[:, None] >= index)) | (
        in_prefix[None] & (row > 0)[:, None]
    )
    if window is not None:
        # Distance is by index inside a segment, by position to the prefix.
        near = np.where(row[:, None] == row, index[:, None] - index, place[:, None] - place) < window
        seen &= near

    def naive(q, k, v):
        k, v = (jnp.repeat(x, 2, 1) for x in (k, v))
        scores = jnp.einsum("nhd,mhd->hnm", q, k) * shape.attention_scale
        return jnp.einsum("hnm,mhd->nhd", jax.nn.softmax(jnp.where(seen, scores, -1e30), -1), v)

    def ours(q, k, v):
        return attend(shape, kernel, grid, q, k, v, places, jnp.int32(0))

    real_rows = np.flatnonzero((owner > 0) | in_prefix)
    cotangent[np.setdiff1d(index, real_rows)] = 0
    results = []
    for function in (ours, naive):
        output, pull = jax.vjp(jax.jit(function), q, k, v)
        results.append([output[real_rows], *pull(jnp.asarray(cotangent))])
    for mine, theirs in zip(*results, strict=True):
        assert float(jnp.linalg.norm(mine - theirs) / jnp.linalg.norm(theirs)) < 1e-5


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_head_equals_log_softmax(softcap):
    rng = np.random.default_rng(0)
    hidden, weight = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((21, 6), (11, 6)))
    label = jnp.asarray(rng.integers(0, 11, 21), jnp.int32)
    share = jnp.asarray(np.where(np.arange(21) < 15, rng.random(21), 0), jnp.float32)

    def naive(hidden):
        logits = hidden @ weight.T
        logits = jnp.tanh(logits / softcap) * softcap if softcap else logits
        return jax.nn.log_softmax(logits / 0.7)[jnp.arange(21), label]

    def ours(hidden):
        return site_logprob(HeadSpec(7, 0.7, softcap), hidden, weight, label, jnp.int32(14))[0]

    np.testing.assert_allclose(ours(hidden)[:14], naive(hidden)[:14], rtol=1e-5, atol=1e-6)
    assert not ours(hidden)[14:].any()  # beyond the count nothing is computed
    grads = [jax.grad(lambda h, f=f: (f(h) * share)[:14].sum())(hidden) for f in (ours, naive)]
    np.testing.assert_allclose(*grads, rtol=1e-4, atol=1e-6)


def test_nf4_rounds_to_the_nearest_level():
    matrix = np.random.default_rng(0).standard_normal((37, 50)).astype(np.float32)
    packed = nf4.quantize(jnp.asarray(matrix))
    back = np.asarray(nf4.dequantize(packed, (37, 50), jnp.float32))
    flat = np.pad(matrix.ravel(), (0, -matrix.size % 64)).reshape(-1, 64)
    top = np.abs(flat).max(1, keepdims=True)
    nearest = nf4.LEVELS[np.abs(flat[..., None] / top[..., None] - nf4.LEVELS).argmin(-1)] * top
    np.testing.assert_allclose(back, nearest.ravel()[: matrix.size].reshape(37, 50), rtol=1e-6)
    assert packed.codes.nbytes + packed.absmax.nbytes == 36 * flat.shape[0]
    assert not np.asarray(nf4.dequantize(nf4.quantize(jnp.zeros((3, 5))), (3, 5), jnp.float32)).any()


def test_a_four_bit_base_computes_with_its_rounded_weights(family, tmp_path):
    """The same as a float model whose linear layers hold the rounded values, gradient included; and it learns."""
    import shutil

    from safetensors.numpy import load_file, save_file

    rounded = tmp_path / "llama"
    shutil.copytree(family("llama"), rounded)
    tensors = load_file(rounded / "model.safetensors")
    for layer in range(2):
        for paths in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("self_attn.o_proj",),
                      ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",)):  # fmt: skip
            names = [f"model.layers.{layer}.{path}.weight" for path in paths]
            together = np.concatenate([tensors[name] for name in names])
            value = np.asarray(
                nf4.dequantize(nf4.quantize(jnp.asarray(together)), together.shape, jnp.float32)
            )
            at = 0
            for name in names:
                tensors[name], at = value[at : at + len(tensors[name])].copy(), at + len(tensors[name])
    save_file(tensors, rounded / "model.safetensors")
    packed = batch([samples([9, 14])], 32)
    made, plain = engine(family("llama"), quantization="4bit"), engine(rounded)
    ours, theirs = (one.forward_backward(packed, CrossEntropy()) for one in (made, plain))
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    grads = (one._names.unstack(one._trained.gradient) for one in (made, plain))
    for mine, their in zip(*(g.values() for g in grads), strict=True):
        np.testing.assert_allclose(mine, their, rtol=1e-3, atol=1e-4)
    first = ours["loss"]
    for _ in range(15):
        made.optim_step(2e-2, ours["weight"])
        ours = made.forward_backward(packed, CrossEntropy())
    assert ours["loss"] < 0.7 * first


def test_sixteen_bit_base_keeps_float32_masters(family):
    made = engine(family("llama"), warm=False, precision="bfloat16")
    assert all(v.dtype == np.float32 for v in made.state().parameters.values())
    packed = batch([samples([9, 30])], 48)
    first = None
    for _ in range(20):
        sums = made.forward_backward(packed, CrossEntropy())
        first = first or sums["loss"]
        made.optim_step(1e-2, sums["weight"])
    assert sums["loss"] < 0.8 * first
