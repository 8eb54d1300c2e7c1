"""One tree of typed settings: the only home of defaults, of what they mean, and of the rules between them.

Every settings class forbids unknown keys and is frozen. A run's resolved tree is written to its `config.toml`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, lt=1)]


class Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ModelSettings(Settings):
    path: str = DEFAULT_MODEL
    """Local folder or Hugging Face Hub id of the base model."""
    revision: str | None = None
    """Hub revision (branch, tag or commit)."""
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of the frozen base; auto asks the device."""
    quantization: Literal["none"] = "none"
    """Form in which the frozen base is kept."""
    device: Literal["auto", "cpu", "mps", "cuda"] = "auto"
    """Where the engine computes."""
    gradient_checkpointing: bool = False
    """Recompute each layer in the backward pass: about a quarter slower, a fraction of the activations."""
    head_chunk: PositiveInt = 256
    """Sites whose logits [chunk, V] are alive at once."""


class AdapterSettings(Settings):
    kind: Literal["lora", "full"] = "lora"
    """What is trained: low-rank adapters on a frozen base, or every parameter."""
    rank: PositiveInt = 16
    alpha: PositiveFloat = 32.0
    """The low-rank product is scaled by alpha / rank."""
    target_modules: tuple[str, ...] = LINEAR_LAYERS
    """Last name of the linear layers that get an adapter."""

    @model_validator(mode="after")
    def _targets(self) -> AdapterSettings:
        if self.kind == "lora" and not self.target_modules:
            raise ValueError("target_modules is empty: name at least one linear layer, such as q_proj")
        return self


class OptimizerSettings(Settings):
    learning_rate: PositiveFloat = 2e-4
    schedule: Literal["cosine", "constant"] = "cosine"
    """After a linear warm-up: down to `final_share` of the peak along a cosine, or constant."""
    warmup_share: Share = 0.05
    """Share of all steps in which the learning rate rises linearly."""
    final_share: Share = 0.1
    """Where the cosine ends, as a share of the peak."""
    beta1: Share = 0.9
    beta2: Share = 0.999
    epsilon: PositiveFloat = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled (AdamW)."""
    clip_norm: PositiveFloat = 1.0
    """Global gradient norm above which the gradient is scaled down."""


class RenderingSettings(Settings):
    max_length: Annotated[int, Field(ge=0)] = 0
    """Longest window in tokens; 0 takes it from the data, the model's context and the memory there is."""
    min_context: Annotated[int, Field(ge=0)] | None = None
    """Tokens of context before the first supervised token of a later window; none is a quarter of max_length."""
    include_reasoning: bool = False
    """Render and supervise the model's thinking where the template has a place for it."""


class DataSettings(Settings):
    path: str = ""
    """Conversations as `instep data build` writes them, or session files and folders."""
    validation_path: str | None = None
    """Held-out conversations; without it a share of the data is held out, by session."""
    validation_share: Share = 0.1
    pack: bool = True
    """Put several short samples in one row; they cannot attend to each other."""


class RunSettings(Settings):
    folder: str | None = None
    """Run folder; without it `runs/<time>-<model>` is made."""
    checkpoint_every_steps: PositiveInt = 10
    evaluate_every_steps: PositiveInt = 20
    """Held-out evaluation, besides the ones before the first and after the last step."""
    evaluation_rows: PositiveInt = 64
    """At most so many held-out rows are evaluated, taken evenly over the whole."""


class SftSettings(Settings):
    """Everything that `instep sft` does, resolved."""

    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    engine: Literal["auto", "torch", "mlx", "jax"] = "auto"
    model: ModelSettings = ModelSettings()
    adapter: AdapterSettings = AdapterSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    data: DataSettings = DataSettings()
    rendering: RenderingSettings = RenderingSettings()
    run: RunSettings = RunSettings()
    epochs: PositiveFloat = 1.0
    max_steps: PositiveInt | None = None
    """Stop after so many optimizer steps, whatever `epochs` says."""
    max_minutes: PositiveFloat | None = None
    """Stop training after so many minutes of steps; the schedule follows the clock then."""
    rows_per_step: PositiveInt = 4
    """Rows of one optimizer step."""
    rows_per_batch: PositiveInt = 1
    """Rows of one micro-batch; changes memory and speed, not the step."""

    @model_validator(mode="after")
    def _rows(self) -> SftSettings:
        if self.rows_per_step % self.rows_per_batch:
            raise ValueError(
                f"rows_per_step ({self.rows_per_step}) must be a multiple of rows_per_batch ({self.rows_per_batch})"
            )
        return self
