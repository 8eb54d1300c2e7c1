"""Llama 2, 3, 3.1, 3.2 and what shares their form (SmolLM2)."""

from __future__ import annotations

from instep.engines.jax.architecture import Architecture, ConfigReader, Kind, kinds_of


def architecture(config: ConfigReader) -> Architecture:
    layers, hidden = config.integer("num_hidden_layers"), config.integer("hidden_size")
    heads = config.integer("num_attention_heads")
    head_dim = config.head_dim(heads, hidden)
    config.activation("hidden_act", "silu")
    config.must_be_off("mlp_bias")
    kinds, kind_of_layer = kinds_of([Kind(config.rope())] * layers)
    bias = config.flag("attention_bias")
    return Architecture(
        family="llama",
        layers=layers,
        hidden=hidden,
        intermediate=config.integer("intermediate_size"),
        heads=heads,
        kv_heads=config.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        vocabulary=config.integer("vocab_size"),
        epsilon=config.number("rms_norm_eps", 1e-6),
        kinds=kinds,
        kind_of_layer=kind_of_layer,
        tied=config.flag("tie_word_embeddings"),
        attention_scale=head_dim**-0.5,
        qkv_bias=bias,
        o_bias=bias,
    )
