"""A model that answers: base or adapter, on any engine, with the settings that its run was trained with."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from instep import engines, models
from instep.chat.stream import TextStream
from instep.config import GenerationSettings
from instep.engines.base import Engine, LoadReport, Sampling
from instep.errors import InputError
from instep.loops.evaluate import settings_of
from instep.loops.prompts import prompt_renderer
from instep.loops.run import load_trained
from instep.records import Message, StopReason
from instep.rendering.template import Renderer
from instep.sessions.chat import chat_messages, tool_schemas
from instep.sessions.report import ReadReport
from instep.settings_file import merge, put, read_tree, validate

TAKEN_FROM_RUN = ("model", "seed", "max_new_tokens", "stop_strings")


@dataclass(frozen=True)
class Answer:
    """One answer of the model; `str(answer)` is its text."""

    text: str
    """Without the stop token or stop string that ended it."""
    tokens: np.ndarray
    """int32 [T], the sampled ids, what ended the answer included."""
    stop: StopReason
    prompt_tokens: int
    first_token_seconds: float
    """From the call to the first sampled token: reading the prompt."""
    seconds: float

    def __str__(self) -> str:
        return self.text

    @property
    def tokens_per_second(self) -> float | None:
        """Sampled tokens after the first, over the time that they took; None where there was no second one."""
        after = self.seconds - self.first_token_seconds
        return (len(self.tokens) - 1) / after if len(self.tokens) > 1 and after > 0 else None

    def stats(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": len(self.tokens),
            "stop": self.stop.value,
            "first_token_seconds": self.first_token_seconds,
            "tokens_per_second": self.tokens_per_second,
            "seconds": self.seconds,
        }


@dataclass
class ChatModel:
    """A loaded model; `instep.load` makes one."""

    engine: Engine
    report: LoadReport
    renderer: Renderer
    folder: Path
    settings: GenerationSettings
    context_tokens: int

    @property
    def name(self) -> str:
        """Which model answers, for people."""
        path = self.settings.model.path
        return path if self.settings.adapter is None else f"{path} with {self.settings.adapter}"

    def chat(
        self,
        messages: str | Sequence[Mapping[str, Any] | Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        on_text: Callable[[str], None] | None = None,
        stop: Callable[[], bool] | None = None,
        adapter: bool = True,
        **settings: Any,
    ) -> Answer:
        """The assistant's next message.

        messages  a text (one user message), or messages in the OpenAI form
        tools     schemas in the OpenAI form; a call appears in the text as the model writes it
        on_text   is handed the text piece by piece, whole characters only
        stop      is asked at every token; True ends the answer where it is (StopReason.ABORTED)
        adapter   False answers as the base model
        settings  any of GenerationSettings for this answer: temperature, max_new_tokens, stop_strings, …
        Raises InputError for wrong input, and where the conversation does not fit the model's context.
        """
        chosen = self._with(settings)
        prompt = self.prompt(messages, tools)
        room = self.context_tokens - len(prompt)
        if room < 1:
            raise InputError(
                f"the conversation has {len(prompt)} tokens and the model's context {self.context_tokens}: "
                "shorten it, or begin a new one"
            )
        sampling = Sampling(
            min(chosen.max_new_tokens, room),
            chosen.temperature,
            chosen.top_p,
            chosen.top_k,
            chosen.min_p,
            self.renderer.stop_tokens,
            chosen.seed,
        )
        return self._sample(prompt, sampling, chosen.stop_strings, on_text, stop, adapter)

    def prompt(
        self, messages: str | Sequence[Mapping[str, Any] | Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> np.ndarray:
        """Token ids int32 [P] that the model is asked with. Raises InputError."""
        return self.renderer.prompt(read_messages(messages), read_tools(tools))

    def _with(self, settings: Mapping[str, Any]) -> GenerationSettings:
        if not settings:
            return self.settings
        for name in ("model", "engine", "adapter", "include_reasoning"):
            if name in settings:
                raise InputError(f"{name} cannot change for one answer: load the model anew")
        return validate(
            GenerationSettings, self.settings.model_dump() | dict(settings), "settings of the answer"
        )

    def _sample(
        self,
        prompt: np.ndarray,
        sampling: Sampling,
        stop_strings: Sequence[str],
        on_text: Callable[[str], None] | None,
        stop: Callable[[], bool] | None,
        adapter: bool,
    ) -> Answer:
        stream = TextStream(self.renderer.tokenizer, stop_strings, sampling.stop_tokens)
        began = time.perf_counter()
        first: list[float] = []
        aborted: list[bool] = []

        def on_token(_prompt: int, _sample: int, token: int) -> None:
            if not first:
                first.append(time.perf_counter() - began)
            tell(stream.push(token))

        def ends(_ids: np.ndarray) -> bool:
            if not stream.stopped and stop is not None and stop():
                aborted.append(True)
            return stream.stopped or bool(aborted)

        def tell(piece: str) -> None:
            if piece and on_text is not None:
                on_text(piece)

        # Full fine-tuning has no adapter to switch off, and a plain model needs none to be computed.
        with_adapter = adapter and self.settings.adapter is not None
        ((rollout,),) = self.engine.generate(
            [prompt], 1, sampling, stop_text=ends, on_token=on_token, adapter=with_adapter
        )
        seconds = time.perf_counter() - began
        tell(stream.finish())
        reason = StopReason.ABORTED if aborted else rollout.stop
        return Answer(stream.text, rollout.tokens, reason, len(prompt), first[0], seconds)


def read_messages(messages: str | Sequence[Mapping[str, Any] | Message]) -> list[Message]:
    """Messages of the OpenAI form as records. Raises InputError for what is none, and where there is none."""
    if isinstance(messages, str):
        return [Message("user", messages)]
    result: list[Message] = []
    for number, message in enumerate(messages):
        if isinstance(message, Message):
            result.append(message)
            continue
        read = chat_messages([message], ReadReport())
        if read is None:
            found = message.get("role") if isinstance(message, Mapping) else type(message).__name__
            raise InputError(
                f"message {number}: expected an object with a role (system, user, assistant, tool) and content, "
                f"found {found!r}"
            )
        result.extend(read)
    if not result:
        raise InputError("there is no message to answer")
    return result


def read_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tool schemas in the OpenAI form, from that form or from bare functions. Raises InputError."""
    report = ReadReport()
    schemas = tool_schemas(list(tools) if isinstance(tools, Sequence) else tools, report)
    if report.quarantined or (tools and not schemas):
        raise InputError(
            'tools: expected a list of {"type": "function", "function": {"name": …, "parameters": …}}'
        )
    return schemas


def generation_settings(
    target: str | None, flags: Mapping[str, Any], overrides: Mapping[str, Any] | None = None
) -> GenerationSettings:
    """Settings for a run, adapter folder, model folder or Hub id, with `flags` (dotted names, None is not given)
    and `overrides` above what its run was trained with. Raises InputError."""
    adapter = flags.get("adapter")
    tree = _base(adapter, "adapter") if adapter is not None else {}
    if target is not None:
        own = _base(target)
        if "adapter" in tree and "adapter" in own:
            raise InputError(f"{target} and --adapter {adapter} both bring an adapter: give one of them")
        tree = merge(tree, own)
    given = {name: value for name, value in flags.items() if value is not None and name != "adapter"}
    if "model.path" in given:
        tree["model"] = {name: value for name, value in tree.get("model", {}).items() if name != "revision"}
    for name, value in (given | dict(overrides or {})).items():
        put(tree, name, value)
    tree.setdefault("model", {})["gradient_checkpointing"] = False
    return validate(GenerationSettings, tree, "settings of the generation")


def _base(target: str | None, what: str = "") -> dict[str, Any]:
    """What a run, an adapter folder or a model brings along; with `what` it has to bring a trained result."""
    if target is None:
        return {}
    tree, run = settings_of(target)
    result = {name: tree[name] for name in TAKEN_FROM_RUN if name in tree}
    if "adapters" in tree:
        result["adapter"] = target
    elif what and run is None:
        raise InputError(
            f"--adapter {target}: neither a run nor an adapter folder; a whole model goes to --model"
        )
    if run is not None:
        thinks = read_tree(str(run / "config.toml")).get("rendering", {}).get("include_reasoning")
        result |= {"include_reasoning": True} if thinks else {}
    return result


def open_model(settings: GenerationSettings) -> ChatModel:
    """Load what the settings name. Raises InputError; the template and context are read before the weights."""
    name, _ = engines.choose(settings.engine, settings.model)
    folder = models.resolve(settings.model.path, settings.model.revision)
    renderer = prompt_renderer(folder, settings.include_reasoning)
    context = models.context_length(models.decoder_config(folder))
    engine, report = load_trained(name, settings.model, folder, settings.adapter, settings.seed)
    return ChatModel(engine, report, renderer, folder, settings, context)


def load(target: str | Path | None = None, **settings: Any) -> ChatModel:
    """See `instep.load`."""
    flags: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            flags |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            flags[name] = str(value) if isinstance(value, Path) else value
    return open_model(generation_settings(None if target is None else str(target), flags))
