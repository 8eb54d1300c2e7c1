"""Rewards: what can be checked about a completion, by built-in functions and by those of a user's file."""

from __future__ import annotations

from instep.rewards.answers import Verdict, canonical, extract_answer
from instep.rewards.judge import Judge
from instep.rewards.score import Rewards

__all__ = ["Judge", "Rewards", "Verdict", "canonical", "extract_answer"]
