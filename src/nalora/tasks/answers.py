"""Read the number of a generated answer: as the published comparisons do, and as a careful reader would."""

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

# Marks of a final answer; "the answer is not 5" is none.
_MARK = re.compile(
    r"(?P<hashes>####)|(?P<box>\\(?:boxed|fbox))"
    r"|\banswers?[\s*_]*(?:\b(?:is|are|equals|would be|will be)\b(?!\s+not\b)|[:=])",
    re.IGNORECASE,
)
# Text after these words, in brackets with words, or after the sentence contains reasons, not the answer.
_ASIDE = re.compile(r"[.;!?](?=\s|$)|\b(?:because|since|where|which|as)\b|\((?=[^()]*[A-Za-z]{2})")
# "#### 2. Add the costs" is a heading.
_HEADING = re.compile(r"[^A-Za-z0-9]*[0-9]+[.)]\s+[A-Za-z]")

_DASHES = str.maketrans(dict.fromkeys("−﹣－‐‑–", "-"))
_VULGAR = "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")

# Decimals are rounded: 0.333333 means 1/3.
_TOLERANCE = Fraction(1, 10**6)


def published(text: str) -> Fraction | None:
    """Return the digits after the first ``####``, as the published comparisons do, or None.

    Commas, signs and decimals are not read: ``#### 1,234`` is 1, and ``#### -3`` is None.
    """
    match = re.search(r"####\s*(\d+)", text)
    return _exact(match[1]) if match else None


def robust(text: str) -> Fraction | None:
    r"""Return the number that a careful reader would take as the final answer, or None.

    It is the number after the last mark that is followed by one (``####``, "the answer is", ``\boxed``), or without
    marks the last number. If a calculation follows the mark, its result is used. Units are ignored, and so are "%"
    and "million", as in GSM8K's own answers ("25%" is 25, "$4 million" is 4).
    """
    text = _plain(text)
    for mark in reversed(list(_MARK.finditer(text))):
        answer = _after(mark, text)
        if answer is not None:
            return answer
    numbers = _numbers(text)
    return numbers[-1] if numbers else None


def same_number(one: Fraction | int | None, other: Fraction | int | None) -> bool:
    """Return whether two numbers agree: exactly for integers, to a millionth for decimals; None agrees with nothing."""
    if one is None or other is None:
        return False
    one, other = Fraction(one), Fraction(other)
    if one == other or one.denominator == other.denominator == 1:
        return one == other
    # Large decimals must still differ when they visibly do.
    return abs(one - other) <= min(_TOLERANCE * max(abs(one), abs(other)), Fraction(1, 1000))


def _after(mark: re.Match[str], text: str) -> Fraction | None:
    after = text[mark.end() :]
    if mark["box"]:
        return _result(_braced(after))
    line = after.lstrip(" \t\r\n:*_=#[\\").partition("\n")[0]
    if mark["hashes"] and (_HEADING.match(line) or not re.match(r"[^A-Za-z]*[0-9]|\\?[A-Za-z]\s*=", line)):
        return None
    return _result(line)


def _braced(text: str) -> str:
    """Return the group in braces at the start of a text, or its first word."""
    text = text.lstrip()
    if not text.startswith("{"):
        return text.split()[0] if text else ""
    depth = 0
    for position, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[1:position]
    return text[1:]


def _result(statement: str) -> Fraction | None:
    """Return the first number, or the first one after the last "=" of a calculation."""
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
    """Normalise minus signs, groups of digits, fractions, powers and currencies."""
    text = text.translate(_DASHES)
    text = re.sub(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}", r" \1 ", text)
    text = text.replace("{,}", ",").replace("\\!", "").replace("\\%", "%").replace("\\$", "$")
    text = re.sub(r"(?<=[0-9])(?:\\[,; ]|[\u00a0\u2009\u202f])(?=[0-9]{3}(?![0-9]))", ",", text)
    text = re.sub(r"\\[dtc]?frac\s*\{([^{}]+)\}\s*\{([^{}]+)\}", _fraction, text)
    text = re.sub(r"\\[dtc]?frac\s*([0-9])\s*([0-9])", _fraction, text)
    text = re.sub(f"[{_VULGAR}]", lambda m: _spaced(m, unicodedata.normalize("NFKC", m[0]).replace("⁄", "/")), text)
    # Powers of numbers are read (10⁶); those of units are not (m²).
    text = re.sub(r"(?<=[0-9])[⁻⁺]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+", lambda m: "^" + m[0].translate(_SUPERSCRIPTS), text)
    text = re.sub(r"(?:\b(?:US|A|C))?\$+\s?|[€£¥₹]\s?|\b(?:Rs\.?|USD|EUR|GBP)\s?(?=[0-9-])", _spaced, text)
    return re.sub(r"\bnegative\s+(?=[0-9.])", "-", text)


def _fraction(match: re.Match[str]) -> str:
    return _spaced(match, f"{match[1].strip()}/{match[2].strip()}")


def _spaced(match: re.Match[str], text: str = "") -> str:
    """Return the text, with a space after a number or word: 2½ is 2 1/2, but -½ is -1/2."""
    before = match.string[match.start() - 1 : match.start()]
    return f" {text}" if before.isalnum() else text
