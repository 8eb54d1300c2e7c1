"""The one extractor and comparison of answers, used by the reward and by the evaluation alike.

Everything here is bounded string and integer work in the calling process. What needs symbolic algebra is told
by `compare` (None) and decided in a worker process (instep.rewards.symbolic). Model text is never evaluated.
"""

from __future__ import annotations

import json
import re
import unicodedata
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

from instep.tasks.prompts import Tags

MAX_ANSWER = 2000
MAX_DIGITS = 400
"""Longer numbers are compared as text: a run of digits of a degenerate model is no number to calculate with."""
RELATIVE_TOLERANCE = Fraction(1, 10**6)

SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
CURRENCY = "$€£¥₹₽₩₺₴₦₱฿¢"
NUMBER = re.compile(
    r"""(?<![\w.])
    (?P<sign>[-+])? \s? [CURRENCY]? \s? (?P<sign2>[-+])?
    (?P<whole> \d{1,3}(?:[,_\ ]\d{3})+(?!\d) | \d+ )? (?P<decimals> \.\d+ )?
    (?: [eE](?P<exponent>[-+]?\d{1,3})(?![\w.]) )?
    """.replace("CURRENCY", re.escape(CURRENCY)),
    re.VERBOSE,
)
FRACTION = re.compile(r"([-+]?)\s*(?:(\d{1,40})\s+(?:and\s+)?)?(\d{1,40})\s*/\s*(\d{1,40})(?=$|[^\d\w/.])")
LATEX_FRACTION = re.compile(
    r"([-+]?)\s*(\d{1,40})?\s*\\[dt]?frac\s*\{\s*(-?\d{1,40})\s*\}\s*\{\s*(\d{1,40})\s*\}"
)
HASHES = re.compile(r"####\s*")
STATED = re.compile(r"\banswer\s*(?:is|:|=)\s*:?\s*", re.IGNORECASE)


class Verdict(StrEnum):
    CORRECT = "correct"
    WRONG = "wrong"
    NO_ANSWER = "no_answer"


def extract_answer(completion: str, tags: Tags) -> str | None:
    """What the completion commits to as its answer; None where it commits to nothing.

    The content of the last answer tag that is closed. Only where there is no answer tag at all (a model that was
    not trained on the format): what follows `####`, a `\\boxed{}`, or the last "answer is". An answer tag that is
    opened and not closed (a completion that was cut) is no answer: its number may be cut too.
    """
    opened, closed = f"<{tags.answer}>", f"</{tags.answer}>"
    end = completion.rfind(closed)
    start = completion.rfind(opened, 0, end) if end >= 0 else -1
    if start >= 0:
        return completion[start + len(opened) : end].strip() or None
    if opened in completion:
        return None
    stated = _boxed(completion)
    if stated is None:
        found = list(HASHES.finditer(completion)) or list(STATED.finditer(completion))
        line = completion[found[-1].end() :].split("\n", 1)[0] if found else ""
        # A sentence ends at ". ", not at the point inside a number.
        stated = re.split(r"\.(?:\s|$)", line, maxsplit=1)[0]
    return stated.strip() or None


def _boxed(text: str) -> str | None:
    """Content of the last `\\boxed{…}` whose braces balance."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 1, start + len("\\boxed{")
    for place in range(begin, min(len(text), begin + MAX_ANSWER)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[begin:place]
    return None


def plain(text: str) -> str:
    """One spelling of an answer: Unicode signs and spaces, Markdown, LaTeX wrapping, quotes, end point removed."""
    # NFKC would make 5² into 52 and 1½ into 11/2.
    text = re.sub(r"(?<=\d)(?=[¼-¾⅐-⅞])", " ", text[:MAX_ANSWER])
    text = re.sub(r"[²³¹⁰⁴-⁹]+", lambda match: "^" + match[0], text)
    text = unicodedata.normalize("NFKC", text)
    text = text.replace("−", "-").replace("–", "-").replace("⁄", "/")
    inner = _boxed(text)
    text = text if inner is None else inner
    text = re.sub(r"\\(?:text|mathrm|mbox)\s*\{([^{}]*)\}", r" \1 ", text)
    text = (
        text.replace("\\$", "$").replace("\\%", "%").replace("\\!", "").replace("\\,", "").replace("{,}", ",")
    )
    text = re.sub(r"\\[()\[\]]", " ", text)
    text = re.sub(r"^\$+([^$]+)\$+$", r"\1", text.strip())
    text = text.replace("**", "") if text.startswith("**") and text.endswith("**") else text
    text = re.sub(r"\s+", " ", text).strip(" `\"'")
    return text[:-1].rstrip() if text.endswith(".") else text


@dataclass(frozen=True)
class Number:
    value: Fraction
    exact: bool
    """False for one written with decimals or an exponent: it may be a rounding."""


def parse_number(text: str) -> Number | None:
    """The one number that an answer gives, units and words around it aside; None where there is not exactly one.

    Understands signs, currency, grouped thousands, decimals, exponents, `3/4`, `1 1/2`, `\\frac{3}{4}`, "2.5
    million", and takes what follows the last `=`. "12 or 13" is none: a hedge is not an answer. A percent sign
    is a unit: "50%" is 50.
    """
    text = plain(text)
    left, equals, right = text.rpartition("=")
    if equals and left.strip() and right.strip():
        text = right.strip()
    for pattern in (LATEX_FRACTION, FRACTION):
        match = pattern.search(text)
        if match:
            outside = text[: match.start()] + text[match.end() :]
            return None if re.search(r"[\d^*+\\]", outside) else _fraction(*match.groups())
    found = [match for match in NUMBER.finditer(text) if match["whole"] or match["decimals"]]
    if len(found) != 1:
        return None
    match = found[0]
    before, after = text[: match.start()], text[match.end() :]
    # What stands around is words and units, not a formula of which this is one part ("2x", "\sqrt{2}", "3^").
    if re.search(r"[\\^*+/_{}<>()\[\]]|\d", before) or re.search(r"[\\*+_{}<>\[\]]|^\s*\^|^\s*/\s*\(", after):
        return None
    if re.match(r"!|\.\d", after):
        return None
    # One letter after the number is a variable ("2 x"), unless it is a unit.
    if re.match(r"\s*[a-zA-Z](?![\w.])\s*($|[-+=])", after) and not re.match(r"\s*[gmlsh]\b", after):
        return None
    digits = re.sub(r"[,_ ]", "", match["whole"] or "0")
    decimals = match["decimals"] or ""
    if len(digits) + len(decimals) > MAX_DIGITS:
        return None
    value = Fraction(digits + decimals)
    if match["exponent"]:
        value *= Fraction(10) ** int(match["exponent"])
    scale = re.match(r"\s*(thousand|million|billion|trillion)\b", after, re.IGNORECASE)
    value *= SCALES[scale[1].lower()] if scale else 1
    negative = (match["sign"] == "-") != (match["sign2"] == "-")
    return Number(-value if negative else value, exact=not decimals and not match["exponent"])


def _fraction(sign: str, whole: str | None, numerator: str, denominator: str) -> Number | None:
    if int(denominator) == 0:
        return None
    value = int(whole or 0) + Fraction(int(numerator), int(denominator))
    return Number(-value if sign == "-" else value, exact=True)


def equal_numbers(given: Number, gold: Number) -> bool:
    """Exactly, or within 1e-6 of the gold value where that is no whole number (it may be a rounding)."""
    if given.value == gold.value:
        return True
    return gold.value.denominator != 1 and abs(given.value - gold.value) <= RELATIVE_TOLERANCE * abs(
        gold.value
    )


def canonical(text: str) -> str:
    """A key that answers of the same meaning share: their number, or else their letters (majority vote)."""
    number = parse_number(text)
    return str(number.value) if number is not None else " ".join(plain(text).casefold().split())


def compare(given: str, gold: str) -> bool | None:
    """Whether two answers mean the same; None where only symbolic algebra could tell.

    In this order: as numbers, as JSON structures, as text without case and spacing.
    """
    if len(given) > MAX_ANSWER:
        return False
    wanted, number = parse_number(gold), parse_number(given)
    if wanted is not None and number is not None:
        return equal_numbers(number, wanted)
    if canonical(given) == canonical(gold) or _squeeze(given) == _squeeze(gold):
        return True
    structures = _structure(given), _structure(gold)
    if structures[1] is not None:
        return structures[0] == structures[1]
    return None if _formula(gold) and _formula(given) else False


def _squeeze(text: str) -> str:
    """Without case, and without spaces that separate nothing: "x + 1" is "x+1", "1 12" is not "11 2"."""
    return re.sub(r"(?<!\w)\s+|\s+(?!\w)", "", plain(text)).casefold()


def _structure(text: str) -> object | None:
    """JSON objects and lists; plain numbers and words are compared as what they are."""
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _formula(text: str) -> bool:
    """Whether the text could be a formula: it has a digit or one letter alone, an operator or a LaTeX command."""
    text = plain(text)
    words = re.findall(r"(?<![\\A-Za-z])[A-Za-z]{2,}", re.sub(r"\\[A-Za-z]+", " ", text))
    functions = {"sqrt", "pi", "sin", "cos", "tan", "log", "ln", "exp", "frac"}
    return (
        len(text) <= 200
        and not [word for word in words if word not in functions]
        and bool(re.search(r"\d|\\|\b[A-Za-z]\b", text))
    )
