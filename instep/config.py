"""One tree of typed settings: the only home of defaults, of what they mean, and of the rules between them.

Every settings class forbids unknown keys and is frozen. A run's resolved tree is written to its `config.toml`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

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
    quantization: Literal["none", "4bit", "8bit"] = "none"
    """Form in which the frozen base is kept: MLX affine groups of 64, JAX NF4 blocks of 64 (QLoRA). A model that
    is stored quantized stays as it is."""
    device: Literal["auto", "cpu", "mps", "cuda", "gpu", "tpu"] = "auto"
    """Where the engine computes. torch: cpu, mps, cuda; mlx: cpu, gpu (Metal or CUDA); jax: cpu, gpu, tpu."""
    gradient_checkpointing: bool = False
    """Recompute each layer in the backward pass: about a quarter slower, a fraction of the activations."""
    head_chunk: PositiveInt = 256
    """Sites whose logits [chunk, V] are alive at once."""


class AdapterSettings(Settings):
    kind: Literal["lora", "full"] = "lora"
    """What is trained: low-rank adapters on a frozen base, or every parameter."""
    rank: Annotated[int, Field(ge=1, le=65_536)] = 16
    alpha: PositiveFloat = 32.0
    """The low-rank product is scaled by alpha / rank."""
    target_modules: tuple[str, ...] = LINEAR_LAYERS
    """Last name of the linear layers that get an adapter."""
    start_from: str | None = None
    """Run or adapter folder whose adapter training begins from; its rank, alpha and target_modules must be the
    same. The reference model of GRPO stays the base without any adapter."""

    @model_validator(mode="after")
    def _targets(self) -> AdapterSettings:
        if self.kind == "full" and self.start_from:
            raise ValueError("start_from names an adapter, but kind is 'full': set model.path instead")
        if self.kind == "lora" and not self.target_modules:
            raise ValueError("target_modules is empty: name at least one linear layer, such as q_proj")
        return self


class OptimizerSettings(Settings):
    learning_rate: Annotated[float, Field(gt=0, le=10)] = 2e-4
    schedule: Literal["cosine", "constant"] = "cosine"
    """After a linear warm-up: down to `final_share` of the peak along a cosine, or constant."""
    warmup_share: Share = 0.05
    """Share of all steps in which the learning rate rises linearly."""
    final_share: Share = 0.1
    """Where the cosine ends, as a share of the peak."""
    beta1: Share = 0.9
    beta2: Share = 0.999
    epsilon: PositiveFloat = 1e-8
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Decoupled (AdamW)."""
    clip_norm: PositiveFloat = 1.0
    """Global gradient norm above which the gradient is scaled down."""


class BuildSettings(Settings):
    """What `instep data build` keeps of the sessions it reads."""

    include_reasoning: bool = False
    """Keep the model's thinking; without it it is left out for good."""
    max_message_chars: Annotated[int, Field(ge=0)] = 200_000
    """Longer texts lose their middle, with a mark that says how much; 0 keeps every length."""
    since: str | None = None
    """Only sessions that started at this date (ISO) or later."""
    project: str | None = None
    """Only sessions whose project path holds this text."""
    exclude_tools: tuple[str, ...] = ()
    """Tools whose calls and results are removed."""
    redact: bool = True
    """Replace secrets, e-mail addresses and home directories by placeholders."""


class RenderingSettings(Settings):
    max_length: Annotated[int, Field(ge=0)] = 0
    """Longest window in tokens; 0 takes it from the data, the model's context and the memory there is."""
    min_context: Annotated[int, Field(ge=0)] | None = None
    """Tokens of context before the first supervised token of a later window; none is a quarter of max_length."""
    include_reasoning: bool = False
    """Render and supervise the model's thinking where the template has a place for it."""


TAG_PATTERN = r"^[A-Za-z][A-Za-z0-9_-]*$"


class FewShot(Settings):
    """One worked example that stands before the question, as a user and an assistant message."""

    question: Annotated[str, Field(min_length=1)]
    reasoning: Annotated[str, Field(min_length=1)]
    answer: Annotated[str, Field(min_length=1)]


class TaskSettings(Settings):
    name: Annotated[str, Field(min_length=1)] = "chain_sum"
    """`gsm8k`, a dataset of reasoning-gym (`chain_sum`, `gsm_symbolic`, …), or a JSONL file of your own."""
    path: str | None = None
    """gsm8k: folder with train.jsonl and test.jsonl; without it openai/gsm8k is fetched from the Hub."""
    test_path: str | None = None
    """JSONL of your own: its held-out tasks; without it a share of `name` is held out by hash."""
    test_share: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """JSONL of your own: the share that is held out where there is no `test_path`."""
    parameters: dict[str, Any] = {}
    """reasoning-gym: the dataset's own parameters, such as {min_terms = 2, max_digits = 2}."""
    train_size: PositiveInt = 10_000
    """reasoning-gym: how many different training tasks there are; they are made when they are needed."""
    test_size: PositiveInt = 200
    """reasoning-gym: how many held-out tasks there are; no training task has the question of one of them."""
    test_seed: Annotated[int, Field(ge=0, lt=2**31)] = 1_000_003
    """reasoning-gym: makes the held-out tasks, the same whatever the run's seed is."""
    reasoning_tag: Annotated[str, Field(pattern=TAG_PATTERN)] = "reasoning"
    answer_tag: Annotated[str, Field(pattern=TAG_PATTERN)] = "answer"
    system_prompt: str | None = None
    """Without it one that asks for the two tags is written; an empty one leaves the system message out."""
    few_shot: tuple[FewShot, ...] = ()
    """Worked examples before the question, rendered in the asked-for format."""

    @property
    def kind(self) -> Literal["gsm8k", "jsonl", "reasoning_gym"]:
        if self.name in ("gsm8k", "openai/gsm8k"):
            return "gsm8k"
        return "jsonl" if self.name.endswith((".jsonl", ".json")) else "reasoning_gym"

    @model_validator(mode="after")
    def _used(self) -> TaskSettings:
        if self.reasoning_tag == self.answer_tag:
            raise ValueError(f"reasoning_tag and answer_tag are both {self.answer_tag!r}: they must differ")
        users = {
            "gsm8k": ("path",),
            "jsonl": ("test_path", "test_share"),
            "reasoning_gym": ("parameters", "train_size", "test_size", "test_seed"),
        }
        for kind, names in users.items():
            for name in names:
                default = type(self).model_fields[name].default
                if kind != self.kind and getattr(self, name) != default:
                    raise ValueError(f"{name} is for {kind} tasks, not for {self.name!r}: remove {name}")
        return self


class DataSettings(Settings):
    path: str = ""
    """Conversations as `instep data build` writes them, or session files and folders."""
    demonstrations: PositiveInt | None = None
    """Instead of `path`: the first so many training tasks of `[task]`, each with its worked solution and answer
    written in the asked-for format. Never one that is held out."""
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
    keep_awake: bool = True
    """Keep the machine from falling asleep while it trains (macOS: caffeinate, Linux: systemd-inhibit)."""
    on_swap: Literal["warn", "pause", "stop"] = "warn"
    """What swap that grows leads to: a line with advice; or, after a checkpoint, a pause until memory is free
    again, or the end of the run."""
    swap_growth_megabytes: PositiveInt = 512
    """So much more swap in use than at the beginning, or than at the last warning, is growth."""
    watch_seconds: Annotated[float, Field(gt=0, le=3600)] = 5.0
    """Memory and swap are looked at, and the heartbeat is written, this often."""


class TrackingSettings(Settings):
    """Where metrics.jsonl, which stays the truth, is mirrored to, by a process of its own."""

    tracker: Literal["auto", "trackio", "tensorboard", "wandb", "none"] = "auto"
    """auto: what INSTEP_TRACKER names, else Trackio where it is installed."""
    project: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")] = "instep"
    """Trackio, Weights & Biases: the project that runs are compared in."""
    folder: str | None = None
    """Trackio's directory; none is TRACKIO_DIR, else `.trackio` beside the run folder."""
    space_id: str | None = None
    """Hugging Face Space (owner/name) that Trackio logs to instead of its directory."""


class SftSettings(Settings):
    """Everything that `instep sft` does, resolved."""

    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    engine: Literal["auto", "torch", "mlx", "jax"] = "auto"
    model: ModelSettings = ModelSettings()
    adapter: AdapterSettings = AdapterSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    data: DataSettings = DataSettings()
    task: TaskSettings | None = None
    """Only for `data.demonstrations`: the tasks that are demonstrated."""
    rendering: RenderingSettings = RenderingSettings()
    run: RunSettings = RunSettings()
    tracking: TrackingSettings = TrackingSettings()
    epochs: PositiveFloat = 1.0
    max_steps: PositiveInt | None = None
    """Stop after so many optimizer steps, whatever `epochs` says."""
    max_minutes: PositiveFloat | None = None
    """Stop training after so many minutes of steps; the schedule follows the clock then."""
    evaluation_rows: PositiveInt = 64
    """At most so many held-out rows are evaluated, taken evenly over the whole."""
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

    @model_validator(mode="after")
    def _demonstrations(self) -> SftSettings:
        if self.data.demonstrations and self.task is None:
            raise ValueError("data.demonstrations needs the tasks: give task.name, such as gsm8k")
        if self.data.demonstrations and self.data.path:
            raise ValueError("data.path and data.demonstrations are both given: remove one of them")
        if self.task is not None and not self.data.demonstrations:
            raise ValueError("task is set but would not be used without data.demonstrations: remove it")
        return self


EPSILONS = {
    "grpo": (0.2, 0.2),
    "bnpo": (0.2, 0.2),
    "dapo": (0.2, 0.28),
    "dr_grpo": (0.2, 0.2),
    "gspo": (3e-4, 4e-4),
}
"""(ε low, ε high) of each GRPO variant, as its paper has it (GSPO clips a whole sequence's ratio)."""


class RewardSettings(Settings):
    functions: tuple[str, ...] = ("correctness", "soft_format", "tag_count")
    """Names of built-in rewards, and functions of Python files of your own as `my_rewards.py:brevity`."""
    weights: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = {}
    """Name → weight in the sum that enters the advantage; 1 where not given, 0 only logs the reward."""
    overlong_tokens: PositiveInt | None = None
    """`length`: the last so many of max_new_tokens are punished, down to -1; none is a quarter of them."""
    timeout_seconds: PositiveFloat = 60.0
    """A function of your own that takes longer for one batch is killed and stops the run."""
    comparison_timeout_seconds: PositiveFloat = 5.0
    """`correctness`: a symbolic comparison that takes longer is killed, and the answer counts as wrong."""

    @model_validator(mode="before")
    @classmethod
    def _list(cls, given: Any) -> Any:
        """`rewards = ["correctness", "my_rewards.py:brevity"]` is short for the table with `functions`."""
        return {"functions": given} if isinstance(given, (list, tuple)) else given

    @model_validator(mode="after")
    def _names(self) -> RewardSettings:
        if not self.functions:
            raise ValueError("functions is empty: name at least one reward, such as correctness")
        twice = {name for name in self.functions if self.functions.count(name) > 1}
        if twice:
            raise ValueError(f"reward named twice: {', '.join(sorted(twice))}")
        unknown = set(self.weights) - set(self.functions)
        if unknown:
            raise ValueError(
                f"weight for {', '.join(sorted(unknown))}, but the rewards are {', '.join(self.functions)}"
            )
        if not any(self.weight(name) for name in self.functions):
            raise ValueError("every reward has weight 0: nothing would be learned")
        return self

    def weight(self, name: str) -> float:
        return self.weights.get(name, 1.0)


class RolloutSettings(Settings):
    group_size: PositiveInt = 8
    """G: completions sampled for each task."""
    max_new_tokens: PositiveInt = 128
    temperature: PositiveFloat = 1.0
    """Every log-probability of the step is taken at this temperature too."""
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_strings: tuple[str, ...] = ()
    """Text that ends a completion, besides the model's own stop tokens."""

    @model_validator(mode="after")
    def _distribution(self) -> RolloutSettings:
        if self.group_size < 2:
            raise ValueError("group_size 1: a group of one has nothing to be compared with; give 2 or more")
        if (self.top_p, self.top_k, self.min_p) != (1.0, 0, 0.0):
            raise ValueError(
                "top_p, top_k and min_p cut the distribution that is sampled from, so that the recorded "
                "log-probabilities are no longer the model's: leave them at 1, 0 and 0, or use temperature"
            )
        return self


class GrpoObjectiveSettings(Settings):
    variant: Literal["grpo", "bnpo", "dapo", "dr_grpo", "gspo"] = "grpo"
    """Which mean the loss is, and whose ratio is clipped: see instep.objectives.loss_weights."""
    epsilon_low: PositiveFloat | None = None
    """Clips the ratio below 1 − ε; none takes the variant's own."""
    epsilon_high: PositiveFloat | None = None
    """Clips the ratio above 1 + ε; none takes the variant's own."""
    beta: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.04
    """Weight of the KL divergence from the reference (the model with the adapter off); 0 saves that pass."""
    iterations: PositiveInt = 1
    """μ: optimizer steps on one set of rollouts."""
    scale_by_std: bool | None = None
    """Divide the advantage by the group's standard deviation; none: yes, but not in dr_grpo."""
    truncated: Literal["keep", "mask"] = "keep"
    """Completions cut at max_new_tokens: trained like the others, or left out of the loss."""

    @property
    def epsilons(self) -> tuple[float, float]:
        """(ε low, ε high), the variant's own where none was given."""
        low, high = EPSILONS[self.variant]
        return self.epsilon_low or low, self.epsilon_high or high

    @property
    def scales_by_std(self) -> bool:
        return self.variant != "dr_grpo" if self.scale_by_std is None else self.scale_by_std

    @model_validator(mode="after")
    def _clip(self) -> GrpoObjectiveSettings:
        if self.epsilons[0] >= 1:
            raise ValueError(f"epsilon_low is {self.epsilons[0]}: above 1 nothing is ever clipped below")
        return self


class GrpoSettings(Settings):
    """Everything that `instep grpo` does, resolved."""

    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    engine: Literal["auto", "torch", "mlx", "jax"] = "auto"
    model: ModelSettings = ModelSettings()
    adapter: AdapterSettings = AdapterSettings()
    optimizer: OptimizerSettings = OptimizerSettings(learning_rate=2e-5, schedule="constant")
    task: TaskSettings = TaskSettings()
    rewards: RewardSettings = RewardSettings()
    rollouts: RolloutSettings = RolloutSettings()
    objective: GrpoObjectiveSettings = GrpoObjectiveSettings()
    run: RunSettings = RunSettings()
    tracking: TrackingSettings = TrackingSettings()
    evaluation_tasks: Annotated[int, Field(ge=0)] = 64
    """Held-out tasks that are answered greedily at each evaluation; 0 evaluates nothing."""
    tasks_per_step: PositiveInt = 2
    """Groups of one set of rollouts."""
    tokens_per_batch: PositiveInt = 4096
    """Completion tokens of one micro-batch, padding included; changes memory and speed, not the step."""
    max_steps: PositiveInt | None = 100
    """Stop after so many steps: sets of rollouts, each with `objective.iterations` updates."""
    max_minutes: PositiveFloat | None = None
    """Stop training after so many minutes of steps; the schedule follows the clock then."""
    no_spread: Literal["drop", "resample"] = "drop"
    """A group whose rewards are all equal: left out of the backward pass, or replaced by another task's."""
    max_resamples: PositiveInt = 3
    """no_spread = "resample": at most so many further sets of rollouts for one step."""
    watchdog_steps: PositiveInt = 10
    """Stop, with advice, after so many steps in a row without any spread or with every completion cut."""

    @model_validator(mode="after")
    def _limits(self) -> GrpoSettings:
        overlong = self.rewards.overlong_tokens
        if overlong is not None and overlong > self.rollouts.max_new_tokens:
            raise ValueError(
                f"rewards.overlong_tokens ({overlong}) is more than rollouts.max_new_tokens "
                f"({self.rollouts.max_new_tokens})"
            )
        if self.max_steps is None and self.max_minutes is None:
            raise ValueError("neither max_steps nor max_minutes is given: the run would never end")
        return self


class EvaluationSettings(Settings):
    """Everything that `instep eval` does, resolved."""

    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    engine: Literal["auto", "torch", "mlx", "jax"] = "auto"
    model: ModelSettings = ModelSettings()
    adapters: dict[str, str] = {}
    """Name → run or adapter folder: each is measured, all on one loaded model."""
    base: bool = True
    """Measure the model without any adapter too."""
    task: TaskSettings
    split: Literal["test", "train"] = "test"
    tasks: PositiveInt = 200
    """The first so many tasks of the split; fewer where it has fewer."""
    greedy: bool = True
    """One completion a task, always the most likely token."""
    samples: Annotated[int, Field(ge=0)] = 0
    """Completions drawn for each task at `temperature`, for pass@k and majority@k; 0 draws none."""
    temperature: PositiveFloat = 1.0
    k: tuple[PositiveInt, ...] = ()
    """The k of pass@k and majority@k, each at most `samples`; none takes 1 and `samples`."""
    max_new_tokens: PositiveInt = 256
    stop_strings: tuple[str, ...] = ()
    """Text that ends a completion, besides the model's own stop tokens."""
    completions_per_batch: PositiveInt = 32
    """Completions decoded together: changes memory and speed, not the result."""

    @model_validator(mode="after")
    def _modes(self) -> EvaluationSettings:
        if not self.greedy and not self.samples:
            raise ValueError("greedy is off and samples is 0: nothing would be measured")
        if not self.base and not self.adapters:
            raise ValueError("base is off and there is no adapter: nothing would be measured")
        if self.k and max(self.k) > self.samples:
            raise ValueError(f"k = {max(self.k)} needs as many samples, but samples is {self.samples}")
        return self


class GenerationSettings(Settings):
    """Everything that `instep generate` and `instep chat` do, resolved."""

    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    engine: Literal["auto", "torch", "mlx", "jax"] = "auto"
    model: ModelSettings = ModelSettings()
    adapter: str | None = None
    """Run or adapter folder."""
    max_new_tokens: PositiveInt = 512
    """Longest answer; less where the model's context has no room for it."""
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.7
    """0 always takes the most likely token."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Draw from the most likely tokens that together have this probability."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Draw from so many most likely tokens; 0 from all."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Draw from tokens of at least this share of the most likely one's probability."""
    stop_strings: tuple[str, ...] = ()
    """Text that ends an answer and is not shown, besides the model's own stop tokens."""
    include_reasoning: bool = False
    """Let the model think first, where its template has a place for it."""

    @model_validator(mode="after")
    def _drawn(self) -> GenerationSettings:
        if self.temperature == 0:
            for name, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
                if getattr(self, name) != off:
                    raise ValueError(f"{name} would not be used: temperature is 0, so that nothing is drawn")
        if "" in self.stop_strings:
            raise ValueError("a stop string is empty: it would end every answer at once")
        return self
