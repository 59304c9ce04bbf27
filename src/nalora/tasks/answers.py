"""The number a written answer comes to: as the published comparisons read it, and as a careful reader would."""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

_INTEGER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_DECIMAL = rf"(?:{_INTEGER}(?:\.[0-9]+)?|\.[0-9]+)"
_POWER = r"\s?(?:\^|\*\*)\s?\{?\s?"
# Exponents stop at three digits: 1e999999999 is degenerate text, and would fill the memory as an exact number.
_NUMBER = re.compile(
    rf"""
    (?P<sign>(?<![\w)\]}}%])-)?               # in 5-3, (a)-3 and 25%-3 the dash subtracts
    (?<![A-Za-z0-9_^/])(?<!\^\{{)(?<![0-9]\.) # not in a word (H2O), an exponent (m^2), a date or a version (1.2.3)
    (?:(?P<whole>{_INTEGER})\s+(?=[0-9]+\s?/\s?[0-9]))?
    (?P<number>{_DECIMAL})
    (?: \s?/\s?(?P<under>{_DECIMAL})(?!\s?/\s?[0-9])
      | [eE](?P<exponent>[-+]?[0-9]{{1,3}})(?![0-9])
      | \s?(?:[×xX*·]|\\times|\\cdot)\s?10{_POWER}(?P<ten>[-+]?[0-9]{{1,3}})(?![0-9])
      | {_POWER}(?P<power>[-+]?[0-9]{{1,2}})(?![0-9])
    )?
    """,
    re.VERBOSE,
)

# What announces a final answer. "The answer is not 5" announces nothing.
_MARK = re.compile(
    r"(?P<hashes>####)|(?P<box>\\(?:boxed|fbox))"
    r"|\banswers?[\s*_]*(?:\b(?:is|are|equals|would be|will be)\b(?!\s+not\b)|[:=])",
    re.IGNORECASE,
)
# After these words, in brackets with words, and after the sentence stand reasons, not the answer.
_ASIDE = re.compile(r"[.;!?](?=\s|$)|\b(?:because|since|where|which|as)\b|\((?=[^()]*[A-Za-z]{2})")
# "#### 2. Add the costs" is a heading.
_HEADING = re.compile(r"[^A-Za-z0-9]*[0-9]+[.)]\s+[A-Za-z]")

_DASHES = str.maketrans(dict.fromkeys("−﹣－‐‑–", "-"))
_VULGAR = "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")

# A decimal is cut somewhere: 0.333333 is meant as 1/3.
_TOLERANCE = Fraction(1, 10**6)


def published(text: str) -> Fraction | None:
    """The digits after the first ``####``, as the published comparisons read them; None where there are none.

    It knows no commas, signs or decimals: ``#### 1,234`` is 1, and ``#### -3`` is nothing.
    """
    match = re.search(r"####\s*(\d+)", text)
    return _exact(match[1]) if match else None


def robust(text: str) -> Fraction | None:
    r"""The number that a careful reader would take as the final answer; None where the text has none.

    That is the number after the last mark which is followed by one (``####``, "the answer is", ``\boxed``), and
    without marks the last number. Where a mark is followed by a calculation its result counts. Units are passed
    over, and so are "%" and "million", as in GSM8K's own answers ("25%" is 25, "$4 million" is 4).
    """
    text = _plain(text)
    for mark in reversed(list(_MARK.finditer(text))):
        answer = _after(mark, text)
        if answer is not None:
            return answer
    numbers = _numbers(text)
    return numbers[-1] if numbers else None


def same_number(one: Fraction | int | None, other: Fraction | int | None) -> bool:
    """Whether two readings agree: exactly for integers, to a millionth where a decimal was cut; never with None."""
    if one is None or other is None:
        return False
    one, other = Fraction(one), Fraction(other)
    if one == other or one.denominator == other.denominator == 1:
        return one == other
    # Large decimals must still differ when a reader sees that they do.
    return abs(one - other) <= min(_TOLERANCE * max(abs(one), abs(other)), Fraction(1, 1000))


def _after(mark: re.Match[str], text: str) -> Fraction | None:
    rest = text[mark.end() :]
    if mark["box"]:
        return _result(_braced(rest))
    line = rest.lstrip(" \t\r\n:*_=#[\\").partition("\n")[0]
    if mark["hashes"] and (_HEADING.match(line) or not re.match(r"[^A-Za-z]*[0-9]|\\?[A-Za-z]\s*=", line)):
        return None
    return _result(line)


def _braced(rest: str) -> str:
    """The group that a text opens with, or its first word where it opens with none."""
    rest = rest.lstrip()
    if not rest.startswith("{"):
        return rest.split()[0] if rest else ""
    depth = 0
    for position, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[1:position]
    return rest[1:]


def _result(statement: str) -> Fraction | None:
    """The number stated first, or behind the last "=" of a calculation."""
    statement = _ASIDE.split(statement)[0]
    numbers = _numbers(statement.rpartition("=")[2]) or _numbers(statement)
    return numbers[0] if numbers else None


def _numbers(text: str) -> list[Fraction]:
    values = (_value(match) for match in _NUMBER.finditer(text))
    return [value for value in values if value is not None]


def _value(match: re.Match[str]) -> Fraction | None:
    value = _exact(match["number"])
    if value is None:
        return None
    if match["under"]:
        under = _exact(match["under"])
        if not under:
            return None
        value /= under
        if match["whole"] and value < 1:
            value += _exact(match["whole"]) or 0
    elif match["exponent"] or match["ten"]:
        value *= Fraction(10) ** int(match["exponent"] or match["ten"])
    elif match["power"]:
        if value == 0 or len(match["number"]) > 9:
            return None
        value **= int(match["power"])
    return -value if match["sign"] else value


def _exact(digits: str) -> Fraction | None:
    try:
        return Fraction(digits.replace(",", ""))
    except ValueError:  # Python reads no integer of more than 4300 digits; a model in a loop writes them
        return None


def _plain(text: str) -> str:
    """The text with one way to write minus signs, groups of digits, fractions, powers and currencies."""
    text = text.translate(_DASHES)
    text = re.sub(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}", r" \1 ", text)
    text = text.replace("{,}", ",").replace("\\!", "").replace("\\%", "%").replace("\\$", "$")
    text = re.sub(r"(?<=[0-9])(?:\\[,; ]|[\u00a0\u2009\u202f])(?=[0-9]{3}(?![0-9]))", ",", text)
    text = re.sub(r"\\[dtc]?frac\s*\{([^{}]+)\}\s*\{([^{}]+)\}", _fraction, text)
    text = re.sub(r"\\[dtc]?frac\s*([0-9])\s*([0-9])", _fraction, text)
    text = re.sub(f"[{_VULGAR}]", lambda m: _spaced(m, unicodedata.normalize("NFKC", m[0]).replace("⁄", "/")), text)
    # Powers of numbers count (10⁶); those of units do not (m²).
    text = re.sub(r"(?<=[0-9])[⁻⁺]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+", lambda m: "^" + m[0].translate(_SUPERSCRIPTS), text)
    text = re.sub(r"(?:\b(?:US|A|C))?\$+\s?|[€£¥₹]\s?|\b(?:Rs\.?|USD|EUR|GBP)\s?(?=[0-9-])", _spaced, text)
    return re.sub(r"\bnegative\s+(?=[0-9.])", "-", text)


def _fraction(match: re.Match[str]) -> str:
    return _spaced(match, f"{match[1].strip()}/{match[2].strip()}")


def _spaced(match: re.Match[str], text: str = "") -> str:
    """The text, kept apart from a number or word right before it: 2½ is 2 1/2, but -½ is -1/2."""
    before = match.string[match.start() - 1 : match.start()]
    return f" {text}" if before.isalnum() else text
