"""What fits in how much memory, and which way to run is advised: the plan's estimates, option by option."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from instep.config import GrpoSettings, SftSettings
from instep.engines import ENGINES
from instep.errors import InputError
from instep.plan import Architecture, Needs, Setup, grpo_needs, longest_row, setup_of, training_needs

USABLE_SHARE = 0.7
"""Of a machine's whole memory: the rest is the system's and other programs', and Metal does not hand out more."""


@dataclass(frozen=True)
class Option:
    """One way to run: an engine, a form of the weights, with or without checkpointing; and what it would need."""

    setup: Setup
    precision: str
    available: bool
    """Whether instep can do this today."""
    sft: Needs
    longest: int
    sampling: Needs
    training: Needs
    budget_bytes: int

    @property
    def name(self) -> str:
        checkpointing = "with" if self.setup.checkpointing else "without"
        return f"{self.setup.engine}, {self.precision} weights, {checkpointing} gradient checkpointing"

    @property
    def sft_fits(self) -> bool:
        return self.sft.total <= self.budget_bytes

    @property
    def grpo_fits(self) -> bool:
        return max(self.sampling.total, self.training.total) <= self.budget_bytes


def options(
    shape: Architecture,
    engines: Sequence[str],
    sft: SftSettings,
    grpo: GrpoSettings,
    length: int,
    prompt: int,
    budget_bytes: int,
) -> list[Option]:
    """Every engine with float and with 4-bit weights, without and with checkpointing, in this order of preference."""
    forms = [("float32" if sft.model.precision == "float32" else "16-bit", False), ("4-bit", True)]
    found = []
    for precision, four_bit in forms:
        if four_bit and sft.adapter.kind == "full":
            continue
        for checkpointing in (False, True):
            for engine in engines:
                setup = replace(setup_of(sft), engine=engine, four_bit=four_bit, checkpointing=checkpointing)
                sampling, training = grpo_needs(shape, setup, grpo, prompt)
                found.append(
                    Option(
                        setup=setup,
                        precision=precision,
                        available=engine in ENGINES
                        and (not four_bit or "4bit" in ENGINES[engine].quantizations),
                        sft=training_needs(shape, setup, sft.rows_per_batch, length),
                        longest=longest_row(shape, setup, sft.rows_per_batch, budget_bytes),
                        sampling=sampling,
                        training=training,
                        budget_bytes=budget_bytes,
                    )
                )
    return found


def recommend(found: Sequence[Option], length: int, budget_bytes: int) -> tuple[Option | None, str]:
    """The first option that is there and has room for SFT at this length, and why; None where none has."""
    room = f"{budget_bytes / 1e9:.1f} GB"
    there = [option for option in found if option.available]
    for option in there:
        if option.sft_fits:
            tight = (
                ""
                if option.grpo_fits
                else "; GRPO does not fit: lower tokens_per_batch or rollouts.group_size"
            )
            return (
                option,
                f"take {option.name}: {option.sft.total / 1e9:.2f} of {room} at {length:,} tokens{tight}",
            )
    if not there:
        return None, "none of these is there yet"
    best = max(there, key=lambda option: option.longest)
    if best.longest:
        return None, (
            f"rows of {length:,} tokens do not fit in {room}; {best.longest:,} do: {best.name} with "
            f"rendering.max_length = {best.longest}"
        )
    return None, f"no row fits in {room}: take a smaller model, or more memory"


def budget_of(memory: str) -> tuple[int, str]:
    """`16GB`, `16 GiB` or `16` (GB) → bytes that a run may take there, and how that was found. Raises InputError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B?)?\s*", memory, re.IGNORECASE)
    total = 0
    if match:
        base = 1024 if match[3] else 1000
        total = round(float(match[1]) * base ** ("KMGT".index((match[2] or "G").upper()) + 1))
    if total <= 0:
        raise InputError(f"--memory {memory!r}: expected an amount of memory such as 16GB or 24GiB")
    budget = int(USABLE_SHARE * total)
    return budget, f"{budget / 1e9:.1f} of {total / 1e9:.1f} GB usable (the rest is the system's)"
