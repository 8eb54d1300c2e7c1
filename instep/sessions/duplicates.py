"""What several sessions share is supervised once.

Three rules, each on what the messages say (not on ids or times), applied to the sessions with most to supervise
first, so that of a session and its shorter copy or fork the fuller one is kept whole:

1. repeated history: the turn and everything before it stand in another session, too (a fork, a resumed session);
2. a repeated turn: the turn and the three messages before it stand in another session, or a long turn (400
   characters or more) stands there word for word;
3. a near-duplicate session: of the runs of 8 words in the turns that are left, 80 % or more stand in one other
   session (containment of shingles, Broder 1997; of long sessions an eighth of the runs is kept) → none of them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

from instep.records import Conversation, Message
from instep.sessions.report import ReadReport, produced_characters

SHINGLE_WORDS = 8
NEAR_DUPLICATE = 0.8
FEWEST_SHINGLES = 20
"""Fewer say nothing about likeness."""
WHOLE_SHINGLES = 4096
"""Conversations with more keep one in SAMPLING, chosen by hash value so that samples can be compared."""
SAMPLING = 8
CONTEXT_MESSAGES = 3
LONG_TURN_CHARACTERS = 400

NEAR = "near-duplicate session"
HISTORY = "repeated history"
TURN = "repeated turn"

_WORD = re.compile(r"\w+")


def supervise_once(conversations: Sequence[Conversation], report: ReadReport) -> list[Conversation]:
    """The conversations in their order, with every turn that another one supervises left as context."""
    order = sorted(
        range(len(conversations)),
        key=lambda i: (
            -sum(message.supervised for message in conversations[i].messages),
            str(conversations[i].source.get("started", "")),
            i,
        ),
    )
    seen = _Seen()
    shingles = _ShingleIndex()
    result = list(conversations)
    for index in order:
        own = _shingles(conversations[index])
        marked = seen.mark(conversations[index], report)
        left = own if marked is conversations[index] else _shingles(marked)
        twin = shingles.find(left, _session(marked))
        result[index] = marked if twin is None else _as_near_duplicate(marked, twin, report)
        shingles.add(own, conversations[index])
    return result


def _session(conversation: Conversation) -> tuple[object, object, object]:
    source = conversation.source
    return source.get("format"), source.get("file"), source.get("session", conversation.id)


def _as_near_duplicate(conversation: Conversation, other: str, report: ReadReport) -> Conversation:
    turns = sum(message.supervised for message in conversation.messages)
    report.not_supervised[NEAR] += turns
    messages = tuple(replace(m, supervised=False) if m.supervised else m for m in conversation.messages)
    return replace(conversation, messages=messages, notes=(*conversation.notes, f"{NEAR} of {other}"))


def _digest(*parts: bytes) -> bytes:
    hashed = hashlib.blake2b(digest_size=16)
    for part in parts:
        hashed.update(len(part).to_bytes(8, "little"))
        hashed.update(part)
    return hashed.digest()


def _said(message: Message) -> bytes:
    calls = [[call.name, call.arguments] for call in message.tool_calls]
    return json.dumps([message.role, message.content, calls], sort_keys=True, ensure_ascii=True).encode()


class _Seen:
    """Which histories, turns in context and long turns the conversations so far supervise."""

    def __init__(self) -> None:
        self.histories: set[bytes] = set()
        self.in_context: set[bytes] = set()
        self.long: set[bytes] = set()

    def mark(self, conversation: Conversation, report: ReadReport) -> Conversation:
        history = b""
        digests: list[bytes] = []
        messages: list[Message] = []
        repeated: Counter[str] = Counter()
        new: list[tuple[set[bytes], bytes]] = []
        for message in conversation.messages:
            digest = _digest(_said(message))
            digests.append(digest)
            history = _digest(history, digest)
            if message.supervised:
                keys = [(HISTORY, self.histories, history)]
                if len(digests) > CONTEXT_MESSAGES:
                    keys.append((TURN, self.in_context, _digest(*digests[-CONTEXT_MESSAGES - 1 :])))
                if produced_characters(message) >= LONG_TURN_CHARACTERS:
                    keys.append((TURN, self.long, digest))
                reason = next((name for name, known, key in keys if key in known), None)
                if reason is not None:
                    repeated[reason] += 1
                    message = replace(message, supervised=False)
                new.extend((known, key) for _, known, key in keys)
            messages.append(message)
        for known, key in new:  # only now: what a session repeats of itself is its own
            known.add(key)
        if not repeated:
            return conversation
        report.not_supervised.update(repeated)
        notes = tuple(f"{count} turns not supervised: {reason}" for reason, count in repeated.items())
        return replace(conversation, messages=tuple(messages), notes=(*conversation.notes, *notes))


def _shingles(conversation: Conversation) -> set[int]:
    """Hashes of the runs of SHINGLE_WORDS words in the supervised turns."""
    hashes: set[int] = set()
    for message in conversation.messages:
        if message.supervised:
            words = _WORD.findall(_said(message).decode())
            for start in range(len(words) - SHINGLE_WORDS + 1):
                run = " ".join(words[start : start + SHINGLE_WORDS]).encode()
                hashes.add(int.from_bytes(hashlib.blake2b(run, digest_size=8).digest(), "little"))
    return hashes


def _sample(hashes: set[int]) -> set[int]:
    return {value for value in hashes if value % SAMPLING == 0}


class _ShingleIndex:
    """Which conversations hold a shingle, and which of them were sampled."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.sessions: list[object] = []
        self.sampled: list[bool] = []
        self.holders: dict[int, list[int]] = defaultdict(list)

    def add(self, hashes: set[int], conversation: Conversation) -> None:
        number, sampled = len(self.ids), len(hashes) > WHOLE_SHINGLES
        self.ids.append(conversation.id)
        self.sessions.append(_session(conversation))
        self.sampled.append(sampled)
        for value in _sample(hashes) if sampled else hashes:
            self.holders[value].append(number)

    def find(self, hashes: set[int], session: object) -> str | None:
        """Id of a conversation of another session that holds nearly all of `hashes`."""
        if len(hashes) < FEWEST_SHINGLES:
            return None
        sample = _sample(hashes)
        shared = Counter(number for value in hashes for number in self.holders.get(value, ()))
        shared_sample = Counter(number for value in sample for number in self.holders.get(value, ()))
        for number, count in shared.most_common():
            if self.sessions[number] == session:
                continue
            if self.sampled[number]:
                count, total = shared_sample[number], len(sample)
            else:
                total = len(hashes)
            if total >= FEWEST_SHINGLES and count >= NEAR_DUPLICATE * total:
                return self.ids[number]
        return None
