"""Comparison of answers by algebra (math-verify) and by reasoning-gym's own scorers. Runs in a worker process.

Two guards stand before it, because sympy can neither be trusted to end nor be interrupted from within (a big
power is one C call, and math-verify's time limit is a signal, which works on the main thread only): formulas
that could grow without bound are refused unread, and the worker is killed when its time is up.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import re
from collections.abc import Mapping
from typing import Any

from instep.rewards.answers import plain

COMMANDS = re.compile(
    r"[dt]?frac|sqrt|pi|cdot|times|div|left|right|pm|mp|infty|circ|degree|sin|cos|tan|log|ln|exp|cup|cap|emptyset"
    r"|in|[lg]eq?|[lg]t|neq|alpha|beta|gamma|theta|lambda|mu|sigma|phi"
)
MAX_FORMULA = 200
MAX_DIGIT_RUN = 30
MAX_POWER = 1000
"""Product of all exponents of one formula."""


def prepare() -> None:
    """Import what the comparisons need, before their time is measured."""
    import math_verify  # noqa: F401

    if importlib.util.find_spec("reasoning_gym") is not None:
        import reasoning_gym  # noqa: F401


def to_latex(text: str) -> str | None:
    """The answer as LaTeX that is safe to parse; None where it is not. Nested powers, factorials and unknown
    commands are refused."""
    text = plain(text).replace("**", "^").replace("×", "\\times ").replace("÷", "\\div ")
    text = re.sub(r"(?<!\\)\bsqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = re.sub(r"(?<![\\A-Za-z])(pi|sin|cos|tan|log|ln|exp)(?![A-Za-z])", r"\\\1 ", text).replace(
        "π", "\\pi "
    )
    if len(text) > MAX_FORMULA or "!" in text or "$" in text or re.search(rf"\d{{{MAX_DIGIT_RUN},}}", text):
        return None
    if not all(COMMANDS.fullmatch(command) for command in re.findall(r"\\([A-Za-z]+)", text)):
        return None
    power = 1
    for match in re.finditer(r"\^", text):
        exponent = re.match(r"\s*(?:\{\s*([^{}^]*)\s*\}|\(\s*([^()^]*)\s*\)|(-?\w))", text[match.end() :])
        if exponent is None or re.match(r"\s*\^", text[match.end() + exponent.end() :]):
            return None
        inside = next(group for group in exponent.groups() if group is not None).strip()
        if re.fullmatch(r"-?\d+", inside):
            power *= max(abs(int(inside)), 1)
        elif not re.fullmatch(r"-?(\d{1,3}\s*)?[A-Za-z]?(\s*/\s*\d{1,3})?", inside):
            return None
        if power > MAX_POWER:
            return None
    # Braces around plain-text exponents: x^10 means x^{10} to whoever wrote it, x^1 0 to LaTeX.
    return re.sub(r"\^\s*(-?\d{2,}|-\d)", r"^{\1}", text)


def symbolic_equal(given: str, gold: str) -> bool:
    """Whether two formulas are equal by algebra; False where either cannot be read as a formula."""
    left, right = to_latex(given), to_latex(gold)
    if left is None or right is None:
        return False
    from math_verify import LatexExtractionConfig, parse, verify

    # It warns once that the time limits are off; the worker's own limit takes their place.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # The LaTeX grammar only: the extractor of plain expressions goes through sympy's parse_expr, an eval.
    targets = [LatexExtractionConfig()]
    parsed = [
        parse(f"${text}$", targets, fallback_mode="no_fallback", parsing_timeout=0) for text in (right, left)
    ]
    return bool(parsed[0] and parsed[1] and verify(parsed[0], parsed[1], timeout_seconds=0))


@functools.lru_cache(maxsize=8)
def _dataset(name: str, parameters: str) -> Any:
    from instep.tasks.gym import create

    return create(name, 0, 1, json.loads(parameters))


def gym_correct(given: str, gym: Mapping[str, Any]) -> bool:
    """Whether the dataset's own scorer gives full marks. Some datasets have more than one right answer.

    The scorer is third-party code meeting text that it may not expect: where it raises, the answer is not one
    that it accepts. Only for datasets of
    `has_own_scorer`: scorers that evaluate text as code are never called.
    """
    dataset = _dataset(gym["dataset"], json.dumps(gym["parameters"], sort_keys=True))
    try:
        return float(dataset.score_answer(given, gym["entry"])) > 0.999
    except Exception:
        logging.getLogger(__name__).debug("the scorer of %s raised", gym["dataset"], exc_info=True)
        return False
