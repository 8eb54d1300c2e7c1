"""What a run needs of memory, from `config.json` alone: one model of it, pure functions, no weights, no framework.

Weights, adapter and caches follow from the model's shapes. How much a layer keeps for the backward pass, how often
logits lie in memory and what a framework holds are the constants in `COSTS`, and only there.

NOT YET CALIBRATED: the constants of the PyTorch engine were derived from what it keeps, and looked at beside a few
measured peaks; those of MLX and JAX are assumed. No error bound is claimed for what is predicted with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from instep.config import LINEAR_LAYERS, AdapterSettings, GrpoSettings, ModelSettings, SftSettings
from instep.engines import choose
from instep.errors import InputError
from instep.models import context_length

LONGEST_BY_CHOICE = 4096
"""Above this, attention costs more than the extra context brings; a longer row is taken only when asked for."""
MEMORY_SHARE = 0.6
"""Share of the free memory that a run may be planned to take when its row length is chosen."""
LENGTH_STEP = 64
SHORTEST_ROW = 256


@dataclass(frozen=True)
class Costs:
    """What an engine's code keeps. Values are of the precision of the activations, per token and layer."""

    framework_bytes: int
    """Libraries, their buffers and the tokenizer."""
    hidden: float
    """Times the hidden size: residual streams, normed inputs, …"""
    heads: float
    """Times the width of queries, keys, values and the attention's output together."""
    inner: float
    """Times the width of the MLP: gate, up, their product, …"""
    keeps_scores: bool
    """Whether attention probabilities [heads, L, L] are kept for the backward pass."""
    logits: float
    """How many float32 copies of one chunk's logits lie in memory at once."""
    quantized_embedding: bool
    """Whether a 4-bit model keeps its embedding in 4 bits too."""


COSTS = {
    # Fused norms, MLP and attention (engines/torch/fused.py, blocks.py) save inputs only.
    "torch": Costs(450_000_000, 4, 1, 2, keeps_scores=False, logits=2, quantized_embedding=False),
    # Assumed, not measured: what automatic differentiation of the plain expressions keeps.
    "mlx": Costs(200_000_000, 10, 2, 4, keeps_scores=True, logits=3, quantized_embedding=True),
    "jax": Costs(500_000_000, 10, 2, 4, keeps_scores=True, logits=3, quantized_embedding=False),
}
FOUR_BIT_BYTES = 4.5 / 8
"""Of a weight: four bits, and a 16-bit scale and offset for each group of 64."""
WORKING_LAYERS = 2
"""Layers' worth of activations that the backward pass itself has in hand: one made again or read, one of gradients."""
QUERY_BLOCK = 128
"""Queries whose scores are alive at once where scores are not kept."""
STATE_BYTES = 4
"""The adapter, its gradient and its two moments are float32."""


@dataclass(frozen=True)
class Architecture:
    """A dense decoder's shapes."""

    name: str
    hidden: int
    layers: int
    inner: int
    heads: int
    key_heads: int
    head_width: int
    vocabulary: int
    tied: bool
    context: int
    small_parameters: int
    """Norms and biases of one layer."""

    @property
    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """Linear layers of one decoder layer: name → (in, out)."""
        queries, keys = self.heads * self.head_width, self.key_heads * self.head_width
        return {
            "q_proj": (self.hidden, queries),
            "k_proj": (self.hidden, keys),
            "v_proj": (self.hidden, keys),
            "o_proj": (queries, self.hidden),
            "gate_proj": (self.hidden, self.inner),
            "up_proj": (self.hidden, self.inner),
            "down_proj": (self.inner, self.hidden),
        }

    @property
    def embedding_parameters(self) -> int:
        """Embedding, and the head where it is one of its own."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def linear_parameters(self) -> int:
        return self.layers * sum(rows * columns for rows, columns in self.linear_shapes.values())

    @property
    def parameters(self) -> int:
        small = self.layers * self.small_parameters + self.hidden
        return self.embedding_parameters + self.linear_parameters + small


def read_architecture(config: Mapping[str, Any]) -> Architecture:
    """Shapes of a decoder (`models.decoder_config`). Raises InputError where it is none that is known here."""
    kind = str(config.get("model_type", ""))
    needed = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    missing = [name for name in needed if not config.get(name)]
    if missing:
        raise InputError(f"config.json of a {kind or 'model without a type'}: it has no {', '.join(missing)}")
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    key_heads = int(config.get("num_key_value_heads") or heads)
    width = int(config.get("head_dim") or hidden // heads)
    norms = 4 if kind.startswith(("gemma2", "gemma3")) else 2
    small = norms * hidden
    if kind.startswith(("qwen3", "gemma3")):
        small += 2 * width
    if kind == "qwen2" or config.get("attention_bias"):
        small += (heads + 2 * key_heads) * width
    return Architecture(
        name=kind,
        hidden=hidden,
        layers=int(config["num_hidden_layers"]),
        inner=int(config.get("intermediate_size") or 4 * hidden),
        heads=heads,
        key_heads=key_heads,
        head_width=width,
        vocabulary=int(config["vocab_size"]),
        # Their config classes' defaults differ.
        tied=bool(config.get("tie_word_embeddings", kind.startswith("gemma"))),
        context=context_length(config),
        small_parameters=small,
    )


def refuse_experts(config: Mapping[str, Any]) -> None:
    """Raises InputError for a mixture of experts, whose memory this does not model."""
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if int(config.get(name) or 0) > 1:
            raise InputError(
                f"config.json has {name} = {config[name]}: the plan knows dense decoders, not mixtures of experts"
            )


@dataclass(frozen=True)
class Setup:
    """What a run's memory depends on beside the model's shapes and its batches."""

    engine: str = "torch"
    value_bytes: int = 2
    """Of a weight and of an activation: 2 for bfloat16 and float16, 4 for float32."""
    four_bit: bool = False
    full: bool = False
    """Every parameter is trained."""
    rank: int = AdapterSettings().rank
    targets: tuple[str, ...] = LINEAR_LAYERS
    checkpointing: bool = False
    head_chunk: int = ModelSettings().head_chunk


def _engine(asked: str) -> str:
    try:
        name = asked if asked in COSTS else choose(asked)[0]
    except InputError:  # none is installed: for an estimate any will do
        return "torch"
    return name if name in COSTS else "torch"


def setup_of(settings: SftSettings | GrpoSettings) -> Setup:
    """`auto` is the engine that this machine would take, and 16 bits."""
    model, adapter = settings.model, settings.adapter
    return Setup(
        engine=_engine(settings.engine),
        value_bytes=4 if model.precision == "float32" else 2,
        four_bit=model.quantization != "none",
        full=adapter.kind == "full",
        rank=adapter.rank,
        targets=adapter.target_modules,
        checkpointing=model.gradient_checkpointing,
        head_chunk=model.head_chunk,
    )


@dataclass(frozen=True)
class Needs:
    """Bytes of one phase of a run, by what they are for."""

    weights: int = 0
    trained: int = 0
    """Values of the adapter; in full fine-tuning the float32 masters beside 16-bit weights."""
    gradient: int = 0
    optimizer: int = 0
    activations: int = 0
    logits: int = 0
    kv_cache: int = 0
    framework: int = 0

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


def trained_parameters(shape: Architecture, setup: Setup) -> int:
    if setup.full:
        return shape.parameters
    sizes = (shape.linear_shapes[name] for name in setup.targets if name in shape.linear_shapes)
    return shape.layers * setup.rank * sum(rows + columns for rows, columns in sizes)


def weight_bytes(shape: Architecture, setup: Setup) -> int:
    """The frozen base as it lies in memory."""
    if not setup.four_bit:
        return shape.parameters * setup.value_bytes
    packed = shape.linear_parameters
    if COSTS[setup.engine].quantized_embedding:
        packed += shape.embedding_parameters
    return round(packed * FOUR_BIT_BYTES) + (shape.parameters - packed) * setup.value_bytes


def loaded(shape: Architecture, setup: Setup) -> Needs:
    """What lies in memory between two steps."""
    state = trained_parameters(shape, setup) * STATE_BYTES
    return Needs(
        weights=weight_bytes(shape, setup),
        trained=0 if setup.full and setup.value_bytes == 4 else state,
        gradient=state,
        optimizer=2 * state,
        framework=COSTS[setup.engine].framework_bytes,
    )


def training_needs(shape: Architecture, setup: Setup, rows: int, length: int, prefix: int = 0) -> Needs:
    """A step on micro-batches of `rows` rows of `length` tokens, each behind one shared prefix."""
    costs, tokens = COSTS[setup.engine], rows * length + prefix
    attention = 2 * (shape.heads + shape.key_heads) * shape.head_width
    values = costs.hidden * shape.hidden + costs.heads * attention + costs.inner * shape.inner
    values += 0 if setup.full else len(setup.targets) * setup.rank
    scores = shape.heads * (rows * length * (length + prefix) + prefix * prefix)
    layer = tokens * values * setup.value_bytes
    if costs.keeps_scores:
        layer += scores * setup.value_bytes
        block = 0
    else:
        block = shape.heads * QUERY_BLOCK * (length + prefix) * 4
    if setup.checkpointing:
        kept = shape.layers * tokens * shape.hidden * setup.value_bytes + WORKING_LAYERS * layer
    else:
        kept = shape.layers * layer + (WORKING_LAYERS - 1) * layer
    chunk = min(setup.head_chunk, tokens)
    # Beside the chunk's logits, the derivative at every site.
    logits = costs.logits * chunk * shape.vocabulary * 4 + tokens * shape.hidden * setup.value_bytes
    return replace(loaded(shape, setup), activations=round(kept + block), logits=round(logits))


def sampling_needs(
    shape: Architecture, setup: Setup, prompts: int, group: int, prompt: int, new: int
) -> Needs:
    """Completions of `new` tokens for `prompts` prompts, `group` each, the prompt's keys and values held once."""
    token = shape.layers * 2 * shape.key_heads * shape.head_width * setup.value_bytes
    rows = prompts * group
    return replace(
        loaded(shape, setup),
        kv_cache=token * (prompts * prompt + rows * new),
        logits=2 * rows * shape.vocabulary * 4,
        activations=round(prompt * (4 * shape.hidden + 2 * shape.inner) * setup.value_bytes),
    )


def grpo_needs(shape: Architecture, setup: Setup, settings: GrpoSettings, prompt: int) -> tuple[Needs, Needs]:
    """(while sampling, while training) of a GRPO step with prompts of `prompt` tokens."""
    new, group = settings.rollouts.max_new_tokens, settings.rollouts.group_size
    rows = max(1, settings.tokens_per_batch // new)
    training = training_needs(shape, setup, min(rows, settings.tasks_per_step * group), new, prompt)
    return sampling_needs(shape, setup, settings.tasks_per_step, group, prompt, new), training


def longest_row(shape: Architecture, setup: Setup, rows: int, budget_bytes: int) -> int:
    """The longest row, a multiple of 64 within the model's context, that a training step has room for; 0 for none."""
    low, high = 0, max(1, min(shape.context, 2**20) // LENGTH_STEP)
    while low < high:
        middle = (low + high + 1) // 2
        if training_needs(shape, setup, rows, middle * LENGTH_STEP).total <= budget_bytes:
            low = middle
        else:
            high = middle - 1
    return low * LENGTH_STEP


def choose_row_length(
    config: Mapping[str, Any],
    longest: int,
    context: int,
    available_bytes: int,
    rows: int,
    setup: Setup,
) -> tuple[int, str]:
    """Row length in tokens and the reason: the shortest of what the data, the model, the memory and
    `LONGEST_BY_CHOICE` allow. `available_bytes` is what is free before the weights are loaded."""
    room = longest_row(read_architecture(config), setup, rows, int(MEMORY_SHARE * available_bytes))
    limits = {
        "the longest conversation": -(-max(longest, LENGTH_STEP) // LENGTH_STEP) * LENGTH_STEP,
        "the model's context": context,
        "the memory that is free": max(SHORTEST_ROW, room),
        "longer rows cost more in attention; set rendering.max_length for more": LONGEST_BY_CHOICE,
    }
    reason = min(limits, key=lambda name: limits[name])
    return limits[reason], f"{limits[reason]}: {reason}"
