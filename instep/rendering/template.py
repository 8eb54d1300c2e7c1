"""From a conversation to tokens and loss weights, through the model's own chat template.

A conversation is rendered with every message's text wrapped in marks, which gives each text's place; with the
marks taken out, the text must equal the plain rendering. The loss is taken on an assistant turn from the end of
the generation prompt through the end-of-turn token. Three rules keep training equal to inference:

- a token border is forced where a generation prompt ends, and at every other border of what is supervised;
  everywhere else the tokens are those of the whole text;
- text that looks like a control token stays text. Control tokens are the special ones and those that the
  template frames turns with; other tokens of the vocabulary are left to the tokenizer;
- where a template writes a turn differently once the conversation has gone on, that turn gets a rendering of
  its own, as the model sees it when it answers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from instep.errors import InputError
from instep.records import Conversation, Message
from instep.rendering.chat import ChatTemplate, Unrenderable
from instep.rendering.dialect import Dialect
from instep.rendering.marks import Marks
from instep.rendering.probes import framing_tokens, probe
from instep.rendering.spans import Places, Production, Rendering, places, productions, supervised
from instep.rendering.tokenizer import PieceEncoder, added_tokens, special_tokens
from instep.rendering.turns import Owner, Turn, dress, map_texts, shape, texts_of

Result = TypeVar("Result")
T = TypeVar("T")
_CHECKED_TURNS = 6
"""Turns per conversation whose prompt is rendered on its own and compared with the whole."""
_CHARACTERS_PER_TOKEN = 16
"""Generous, so that characters kept for a number of tokens hold at least that many."""


@dataclass(frozen=True)
class Rendered:
    """A rendered conversation of T tokens, up to its last supervised one. `weight[t]` is the loss weight of
    predicting `tokens[t]`."""

    tokens: np.ndarray
    """int32 [T]"""
    weight: np.ndarray
    """float32 [T]"""
    message: np.ndarray
    """int32 [T], the message that a token belongs to, role header and end-of-turn included; -1 for none."""
    head: int
    """Tokens at the start that hold the system prompt and the tool schemas."""
    conversation: str

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class _Shaped:
    """A conversation in the template's dialect, ready to be rendered up to any turn."""

    conversation: Conversation
    dialect: Dialect
    turns: list[Turn]
    tools: list[Any]
    marks: Marks
    wrapped: list[dict[str, Any]]
    owners: list[Owner]
    plain: list[dict[str, Any]]

    def wanted(self, number: int) -> bool:
        """Whether the turn shows something that a supervised message said."""
        turn = self.turns[number]
        fields = (*turn.parts, *turn.reasoning, *turn.calls)
        indices = {field.message for field in fields if field.message >= 0}
        return (
            turn.role == "assistant"
            and not turn.empty
            and any(self.conversation.messages[index].supervised for index in indices)
        )


class Renderer:
    """Renders conversations for one tokenizer. Construction tests its template, and raises InputError with the
    reason where supervised tokens would not be exactly what the assistant said."""

    def __init__(self, tokenizer: Any, include_reasoning: bool = False) -> None:
        self.tokenizer = tokenizer
        self.include_reasoning = include_reasoning
        self._template = ChatTemplate(tokenizer)
        self._bos = tokenizer.bos_token or ""
        added = list(added_tokens(tokenizer))
        self.dialect = probe(self._template, added)
        stops = list(dict.fromkeys(layout.stop for layout in self.dialect.layouts.values()))
        framing = framing_tokens(self._template, self.dialect, added)
        self._encoder = PieceEncoder(tokenizer, special_tokens(tokenizer) | set(stops) | framing)
        ids = [tokenizer.convert_tokens_to_ids(stop) for stop in stops]
        if tokenizer.eos_token_id is not None:
            ids.append(tokenizer.eos_token_id)
        self.stop_tokens: tuple[int, ...] = tuple(dict.fromkeys(ids))
        from instep.rendering.selftest import check  # it needs this class

        check(self)

    def render(self, conversation: Conversation, context_tokens: int | None = None) -> list[Rendered]:
        """One rendering that holds every supervised turn, or several where the template rewrites earlier turns.

        With `context_tokens`, each of several keeps only about so many tokens before its first supervised one,
        and the head. An assistant turn that shows nothing (no text, no call) is not supervised. Raises
        InputError where the template fails on the conversation.
        """
        return self._with_way_out(conversation, lambda shaped: self._render(shaped, context_tokens))

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> np.ndarray:
        """Token ids int32 [P] of the messages and the generation prompt: what training tokens of the same
        conversation begin with."""
        conversation = Conversation("prompt", tuple(messages), tuple(tools))
        return self._with_way_out(conversation, self._prompt_tokens)

    def describe(self) -> dict[str, Any]:
        """How this template is used, for reports."""
        return {
            "end_of_turn": self.dialect.layout("content").stop,
            "tools": "by the template" if self.dialect.tools == "native" else "in the text, in Hermes tags",
            "system": "own message" if self.dialect.system else "before the first user message",
            "alternating_roles": self.dialect.alternate,
            "reasoning": self.dialect.reasoning_key or "no place for it",
            "trimmed": {role: name for role, name in self.dialect.trims.items() if name != "none"},
        }

    # -- text ------------------------------------------------------------------------------------

    def _with_way_out(self, conversation: Conversation, work: Callable[[_Shaped], Result]) -> Result:
        """Do the work in the template's dialect; with tools in the text where its own way with them fails on
        this conversation (Mistral: a user's message right after a tool result)."""
        try:
            return work(self._shape(conversation, self.dialect))
        except Unrenderable as error:
            reason = str(error)
        if self.dialect.tools == "native":
            inline = replace(self.dialect, tools="inline", results="user", alternate=True)
            with contextlib.suppress(Unrenderable):  # the first reason is the one to report
                return work(self._shape(conversation, inline))
        raise InputError(
            f"conversation {conversation.id}: the chat template fails on it ({reason}); leave it out"
        )

    def _prompt_tokens(self, shaped: _Shaped) -> np.ndarray:
        thinking = self.include_reasoning and self.dialect.reasoning_key is not None
        plain = self._prompt(shaped, len(shaped.turns), thinking)
        options = self._options(shaped, thinking)
        marked = self._template.render(shaped.wrapped, shaped.tools, generation=True, options=options)
        text, items = shaped.marks.read(marked)
        rendering = Rendering(plain, tuple(items) if text.startswith(plain) else (), shaped.owners)
        cuts = [cut for one in productions(rendering, shaped.turns, shaped.dialect) for cut in one.cuts]
        return self._encoder.encode(plain, shaped.marks.unshield(plain), cuts)[0]

    def _shape(self, conversation: Conversation, dialect: Dialect) -> _Shaped:
        turns = shape(conversation.messages, conversation.tools, dialect, self.include_reasoning)
        marks = Marks(self._encoder.pattern, texts_of(turns, conversation.tools))
        tools = map_texts(list(conversation.tools) if dialect.tools == "native" else [], marks.shield)
        wrapped, owners = dress(turns, dialect, marks, wrap=True)
        plain, _ = dress(turns, dialect, marks, wrap=False)
        return _Shaped(conversation, dialect, turns, tools, marks, wrapped, owners, plain)

    @staticmethod
    def _options(shaped: _Shaped, thinking: bool) -> Mapping[str, Any]:
        return shaped.dialect.reasoning_options if thinking else shaped.dialect.plain_options

    def _marked(self, shaped: _Shaped, count: int, thinking: bool) -> Rendering:
        options = self._options(shaped, thinking)
        text, items = shaped.marks.read(
            self._template.render(shaped.wrapped[:count], shaped.tools, options=options)
        )
        return Rendering(text, tuple(items), shaped.owners)

    def _plain(self, shaped: _Shaped, count: int, thinking: bool) -> str:
        return self._template.render(
            shaped.plain[:count], shaped.tools, options=self._options(shaped, thinking)
        )

    def _prompt(self, shaped: _Shaped, count: int, thinking: bool) -> str:
        text = self._template.render(
            shaped.plain[:count], shaped.tools, generation=True, options=self._options(shaped, thinking)
        )
        return text.removesuffix(shaped.dialect.layout("reasoning" if thinking else "content").dropped)

    # -- spans -----------------------------------------------------------------------------------

    def _render(self, shaped: _Shaped, context_tokens: int | None) -> list[Rendered]:
        if not any(shaped.wanted(number) for number in range(len(shaped.turns))):
            return []
        thinks = {
            bool(turn.reasoning) for turn in shaped.turns if turn.role == "assistant" and not turn.empty
        }
        thinking, count = True in thinks, len(shaped.turns)
        whole = self._marked(shaped, count, thinking)
        readable = whole.text == self._plain(shaped, count, thinking)
        if readable and (
            len(thinks) == 1 or shaped.dialect.plain_options == shaped.dialect.reasoning_options
        ):
            found = productions(whole, shaped.turns, shaped.dialect)
            if self._prefixes_hold(shaped, whole, found, thinking):
                trained = [one for one in found if shaped.wanted(one.turn)]
                return [self._tokenize(shaped, whole, found, trained, None, {})]
        return self._groups(shaped, readable, context_tokens)

    def _prefixes_hold(
        self, shaped: _Shaped, whole: Rendering, found: Sequence[Production], thinking: bool
    ) -> bool:
        """Whether the whole holds every turn as it is when it is answered (a few turns are rendered to see)."""
        shown = sum(turn.role == "assistant" and not turn.empty for turn in shaped.turns)
        return len(found) == shown and all(
            whole.text[: one.prompt_end] == self._prompt(shaped, one.turn, thinking)
            and self._plain(shaped, one.turn + 1, thinking).startswith(whole.text[: one.end])
            for one in _some(found)
        )

    def _groups(self, shaped: _Shaped, readable: bool, context_tokens: int | None) -> list[Rendered]:
        """Turns whose renderings continue each other share one; else each has its own."""
        groups: list[Rendered] = []
        cache: dict[str, Any] = {}
        trained: list[Production] = []
        current: Rendering | None = None
        wanted = [number for number in range(len(shaped.turns)) if shaped.wanted(number)]
        checked = set(_some(wanted))
        for number in wanted:
            rendering, production = self._one_turn(shaped, number, readable, number in checked)
            if current is not None and not rendering.text.startswith(current.text[: trained[-1].end]):
                groups.append(self._tokenize(shaped, current, None, trained, context_tokens, cache))
                trained = []
            trained.append(production)
            current = rendering
        if current is not None:
            groups.append(self._tokenize(shaped, current, None, trained, context_tokens, cache))
        return groups

    def _one_turn(
        self, shaped: _Shaped, number: int, readable: bool, check: bool
    ) -> tuple[Rendering, Production]:
        """The conversation through this turn, as it was when it was answered, and what was produced in it."""
        thinking = bool(shaped.turns[number].reasoning)
        if readable:
            rendering = self._marked(shaped, number + 1, thinking)
            production = productions(rendering, shaped.turns, shaped.dialect, number)
            if production:
                text = rendering.text[: production[0].prompt_end]
                if not check or text == self._prompt(shaped, number, thinking):
                    return rendering, production[0]
        else:
            rendering = Rendering(self._plain(shaped, number + 1, thinking), (), shaped.owners)
        return rendering, self._by_prompt(shaped, number, rendering, thinking)

    def _by_prompt(self, shaped: _Shaped, number: int, rendering: Rendering, thinking: bool) -> Production:
        """The production of the last turn rendered, found by rendering what was asked."""
        turn, text = shaped.turns[number], rendering.text
        prompt = self._prompt(shaped, number, thinking)
        layout = shaped.dialect.layout("reasoning" if thinking else "call" if turn.calls else "content")
        stop_start = text.rfind(layout.stop, len(prompt))
        if not text.startswith(prompt) or stop_start < 0:
            raise Unrenderable(f"message {turn.last_message} is not written after its own generation prompt")
        start = len(prompt)
        said = turn.parts[0].text if turn.parts else ""
        if said and not thinking:
            first = text.find(shaped.marks.shield(said), start)
            if first > start and text[start:first].strip():
                start = first
        items = tuple(item for item in rendering.items if rendering.owner(item).turn == number)
        end = stop_start + len(layout.stop)
        return Production(number, len(prompt), start, stop_start, end, items)

    # -- tokens ----------------------------------------------------------------------------------

    def _tokenize(
        self,
        shaped: _Shaped,
        rendering: Rendering,
        found: Sequence[Production] | None,
        trained: Sequence[Production],
        context_tokens: int | None,
        cache: dict[str, Any],
    ) -> Rendered:
        messages = shaped.conversation.messages
        found = productions(rendering, shaped.turns, shaped.dialect) if found is None else found
        where = places(rendering, [*found, *trained], shaped.turns, messages, shaped.dialect, self._bos)
        skip = (where.head, where.head)
        if context_tokens is not None and trained:
            skip = _skipped(where, trained[0].prompt_end - context_tokens * _CHARACTERS_PER_TOKEN)
        shift = skip[1] - skip[0]
        shielded = rendering.text[: skip[0]] + rendering.text[skip[1] : trained[-1].end]
        cuts = {cut for one in (*found, *trained) for cut in one.cuts}
        moved = [cut if cut <= skip[0] else cut - shift for cut in cuts if not skip[0] < cut <= skip[1]]
        tokens, first = self._encoder.encode(shielded, shaped.marks.unshield(shielded), moved, cache)
        first = np.where(first < skip[0], first, first + shift)
        index = np.searchsorted(np.array(where.starts), first, side="right") - 1
        weight = np.zeros(len(tokens), np.float32)
        for production in trained:
            for one in supervised(production, rendering, shaped.turns[production.turn], messages):
                low, high = np.searchsorted(first, [one.start, one.end])
                weight[low:high] = 1.0
        return Rendered(
            tokens,
            weight,
            np.array(where.owner, np.int32)[index],
            int(np.searchsorted(first, where.head)),
            shaped.conversation.id,
        )


def _some(everything: Sequence[T]) -> list[T]:
    """At most `_CHECKED_TURNS`, the first and the last among them, evenly over the whole."""
    picked = np.linspace(0, len(everything) - 1, min(_CHECKED_TURNS, len(everything))).round().astype(int)
    return [everything[index] for index in dict.fromkeys(picked.tolist())]


def _skipped(where: Places, keep_from: int) -> tuple[int, int]:
    """The characters to leave out: from the head to the last message that starts at or before `keep_from`."""
    starts = [start for start in where.starts if where.head < start <= keep_from]
    return where.head, max(starts, default=where.head)
