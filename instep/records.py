"""The records that flow through the house, as frozen dataclasses. No framework, no file access.

Legend of shapes: R rows, L row length, K sites, V vocabulary, D hidden size, G group size, P prompt length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

import numpy as np

Role = Literal["system", "user", "assistant", "tool"]


class StopReason(StrEnum):
    """Why the assistant's turn (in a session) or the sampled completion (in a rollout) ended."""

    END_OF_TURN = "end_of_turn"
    TOOL_CALL = "tool_call"
    STOP_STRING = "stop_string"
    LENGTH = "length"
    ABORTED = "aborted"
    ERROR = "error"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: Mapping[str, Any]
    """Always an object, never JSON text."""
    id: str | None = None


@dataclass(frozen=True)
class Message:
    role: Role
    content: str = ""
    reasoning: str = ""
    """The model's thinking, apart from `content`; rendered only when asked for."""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    """On a tool message: the call that it answers."""
    name: str | None = None
    """On a tool message: the tool's name."""
    stop: StopReason = StopReason.UNKNOWN
    """On an assistant message: why the turn ended."""
    supervised: bool = False
    """Whether the loss may be taken on this message. Only ever true on assistant messages."""


@dataclass(frozen=True)
class Conversation:
    """A session made uniform. `source` is its provenance: format, file, session, project, started, model."""

    id: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    """Tool schemas in the OpenAI form `{"type": "function", "function": {name, description, parameters}}`."""
    source: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sample:
    """One token sequence. `weight[t]` is the loss weight of predicting `tokens[t]` from what stands before it.

    `weight[0]` is therefore always 0. `tokens` int32 [T], `weight` float32 [T]; for RL also
    `behaviour_logprob`, `reference_logprob`, `advantage` float32 [T] (meaningful where weight > 0).
    """

    tokens: np.ndarray
    weight: np.ndarray
    conversation: str = ""
    """Id of the conversation (SFT) or of the task (RL) that it came from."""
    turns: tuple[int, ...] = ()
    """Indices of the messages of which this sample supervises at least one token."""
    behaviour_logprob: np.ndarray | None = None
    reference_logprob: np.ndarray | None = None
    advantage: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Batch:
    """What an engine is handed: numpy arrays of fixed shape.

    tokens, segment, position  int32 [R, L]; segment 0 is padding, samples of one row are 1, 2, …; position
                               restarts with each segment (and starts at P where there is a prefix)
    site                       int32 [K], flat index into R·L of the position whose hidden state predicts
    label                      int32 [K], the token predicted there
    weight                     float32 [K], 0 on padding sites (whose site and label are 0)
    behaviour_logprob, reference_logprob, advantage   float32 [K], RL only
    sequence                   int32 [K], which sequence (0 … sequences-1) a site belongs to, RL only
    prefix                     int32 [P], tokens that all R rows continue. The last prompt token is not in it
                               but opens every row, so that each label's site lies inside the rows.
    """

    tokens: np.ndarray
    segment: np.ndarray
    position: np.ndarray
    site: np.ndarray
    label: np.ndarray
    weight: np.ndarray
    behaviour_logprob: np.ndarray | None = None
    reference_logprob: np.ndarray | None = None
    advantage: np.ndarray | None = None
    sequence: np.ndarray | None = None
    sequences: int = 0
    prefix: np.ndarray | None = None

    @property
    def weight_sum(self) -> float:
        return float(self.weight.sum(dtype=np.float64))

    @property
    def real_tokens(self) -> int:
        """Tokens that are not padding, the prefix counted once."""
        return int((self.segment > 0).sum()) + (0 if self.prefix is None else len(self.prefix))

    @property
    def padded_tokens(self) -> int:
        """All tokens processed, padding included."""
        return int(self.tokens.size) + (0 if self.prefix is None else len(self.prefix))

    @property
    def supervised_tokens(self) -> int:
        return int((self.weight > 0).sum())

    @property
    def one_segment_per_row(self) -> bool:
        """True where plain causal attention is right: no row holds two samples (padding stands last)."""
        return bool(self.segment.max(initial=0) <= 1)


@dataclass(frozen=True)
class Rollout:
    """One sampled completion: the ids that were sampled (its stop token included) and their log-probabilities."""

    tokens: np.ndarray
    """int32 [T]"""
    logprob: np.ndarray
    """float32 [T], at the sampling temperature, under the distribution that was sampled from."""
    stop: StopReason
    text: str = ""


@dataclass(frozen=True)
class Group:
    """The G rollouts of one task, with what the rewards said of each."""

    task: str
    prompt: np.ndarray
    """int32 [P]"""
    rollouts: tuple[Rollout, ...]
    rewards: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Reward name → float32 [G], NaN where the reward does not apply."""
    advantage: np.ndarray | None = None
    """float32 [G]"""
