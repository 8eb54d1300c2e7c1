"""Gemma-3, the text decoder (arXiv 2503.19786): windows in five of six layers with a rope of their own, norms
around zero before and behind attention and MLP, scaled embeddings."""

from __future__ import annotations

from instep.engines.jax.architecture import Architecture, ConfigReader, Kind, Rope, kinds_of

GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0
WINDOW_PATTERN = 6
"""Every sixth layer sees everything, where config.json names no layer_types."""


def _ropes(config: ConfigReader) -> dict[str, Rope]:
    """Rope of each layer type: nested `rope_parameters`, or rope_theta, rope_local_base_freq and rope_scaling
    (which holds for the layers that see everything)."""
    parameters = config.raw.get("rope_parameters") or {}
    full, sliding = (parameters.get(name) or {} for name in ("full_attention", "sliding_attention"))
    field = "rope_parameters"
    if config.raw.get("rope_scaling"):
        field, full = "rope_scaling", {**full, **config.raw["rope_scaling"]}
    return {
        "full_attention": config.rope_of(field, full, config.number("rope_theta", GLOBAL_THETA)),
        "sliding_attention": config.rope_of(
            "rope_parameters", sliding, config.number("rope_local_base_freq", LOCAL_THETA)
        ),
    }


def architecture(config: ConfigReader) -> Architecture:
    layers, hidden = config.integer("num_hidden_layers", 26), config.integer("hidden_size", 2304)
    heads = config.integer("num_attention_heads", 8)
    config.activation("hidden_activation", "gelu_pytorch_tanh")
    config.must_be_off("attn_logit_softcapping", "use_bidirectional_attention")
    if config.raw.get("layer_types") is None:
        pattern = config.integer("sliding_window_pattern", WINDOW_PATTERN)
        types = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers)]
    else:
        types = config.layer_types(layers)
    window = config.integer("sliding_window", 4096)
    ropes = _ropes(config)
    kinds, kind_of_layer = kinds_of(
        [Kind(ropes[name], window if name == "sliding_attention" else None) for name in types]
    )
    bias = config.flag("attention_bias")
    softcap = config.raw.get("final_logit_softcapping")
    return Architecture(
        family="gemma3_text",
        layers=layers,
        hidden=hidden,
        intermediate=config.integer("intermediate_size", 9216),
        heads=heads,
        kv_heads=config.integer("num_key_value_heads", 4),
        head_dim=config.integer("head_dim", 256),
        vocabulary=config.integer("vocab_size", 262_208),
        epsilon=config.number("rms_norm_eps", 1e-6),
        kinds=kinds,
        kind_of_layer=kind_of_layer,
        tied=config.flag("tie_word_embeddings", True),
        attention_scale=config.number("query_pre_attn_scalar", 256) ** -0.5,
        activation="gelu_tanh",
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        norm_offset=1.0,
        sandwich_norms=True,
        embedding_scale=hidden**0.5,
        logit_softcap=None if softcap is None else float(softcap),
    )
