from __future__ import annotations

import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nalora.tasks.answers import published, robust, same_number

# Generated answers, and the number that a careful reader takes from them, or None.
FORMS = {
    # marks
    "She sells 9 eggs.\n#### 18": 18,
    "####18": 18,
    "#### 18\nThe answer is: 18": 18,
    "9 * 2 = $<<9*2=18>>18 every day.\n#### 18": 18,
    "The answer is 18.": 18,
    "The answer is: 18": 18,
    "the answer is **18**": 18,
    "**Answer:** 18": 18,
    "Answer: $18": 18,
    "Final answer:\n\n18 dollars": 18,
    "The final answer is $\\boxed{18}$.": 18,
    "\\[\n\\boxed{18}\n\\] for 7 days": 18,
    "\\boxed{x = 18}": 18,
    "\\boxed{\\text{18 dollars}}": 18,
    "\\boxed 18": 18,
    "\\boxed{18": 18,
    # the last mark decides, headings and empty marks do not
    "The answer is 5. Wait, that is wrong. The answer is 6.": 6,
    "#### 1. Count the eggs\n#### 2. Add the costs\nThe total is 18": 18,
    "#### Step 2\nso 18 in all": 18,
    "The answer is below.\nIt makes 18": 18,
    "The answer is not 5, it makes 18": 18,
    # calculations and reasons after a mark
    "The answer is 9 * 2 = 18 dollars.": 18,
    "#### 9 * 2 = 18": 18,
    "#### x = 18": 18,
    "The answer is 18 (since 2 + 2 = 4).": 18,
    "The answer is 18 because 9 * 2 is no 17.": 18,
    "The answer is 18. She works 7 days a week.": 18,
    "The answer is 18 apples and 3 pears.": 18,
    # no mark: the last number
    "She has 16 - 3 - 4 = 9 eggs, so $18": 18,
    "16-3": 3,
    "18": 18,
    "18.": 18,
    "1, 2, 3": 3,
    "1,2,3": 3,
    "A range of 5-10": 10,
    "5–10": 10,
    # groups of digits
    "#### 1,234": 1234,
    "#### 1,450,000": 1450000,
    "$1{,}234$": 1234,
    "1\\,234": 1234,
    "1,\\!234": 1234,
    "1\u202f234 in all": 1234,
    # currencies, units, percent
    "#### $18": 18,
    "#### $ 18.00": 18,
    "\\$18": 18,
    "The answer is €1,234.50 per year": Fraction("1234.5"),
    "The answer is Rs. 500.": 500,
    "It costs USD18": 18,
    "It costs 18$": 18,
    "#### 25%": 25,
    "The answer is 25\\%.": 25,
    "#### 5 hours": 5,
    "18 m^2": 18,
    "18 m²": 18,
    "18 cm2": 18,
    "#### 4 million": 4,
    # signs
    "#### -10": -10,
    "#### −10": -10,
    "#### –10": -10,
    "-$5": -5,
    "$-5": -5,
    "The answer is negative 5": -5,
    "x=-5": -5,
    "(-5)": -5,
    # decimals
    "#### 0.5": Fraction(1, 2),
    "#### .5": Fraction(1, 2),
    "It is 3.50.": Fraction(7, 2),
    # fractions and mixed numbers
    "#### 3/4": Fraction(3, 4),
    "The answer is 3 / 4.": Fraction(3, 4),
    "\\boxed{\\frac{3}{4}}": Fraction(3, 4),
    "\\boxed{-\\dfrac{3}{4}}": Fraction(-3, 4),
    "\\frac34": Fraction(3, 4),
    "\\frac{ 3 } { 4 }": Fraction(3, 4),
    "½": Fraction(1, 2),
    "2½ hours": Fraction(5, 2),
    "#### 2 1/2": Fraction(5, 2),
    "-2\\frac{1}{2}": Fraction(-5, 2),
    "#### 1,234 1/2": Fraction(2469, 2),
    "on 3/4/2020": 3,
    # powers
    "1.5e3": 1500,
    "2E-3": Fraction(1, 500),
    "3 \\times 10^{6}": 3000000,
    "3 x 10^6": 3000000,
    "3×10⁻²": Fraction(3, 100),
    "10^6": 1000000,
    "The answer is 2^{10}": 1024,
    # nothing to read
    "": None,
    "I do not know.": None,
    "The answer is H2O": None,
    "5/0": None,
    "0^-1": None,
    "####": None,
    "\\boxed": None,
    "\\boxed{}": None,
    "9" * 5000: None,
}


@pytest.mark.parametrize("text", FORMS, ids=lambda text: text[:40])
def test_a_careful_reader_takes_this_number(text):
    assert robust(text) == FORMS[text]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 18", 18),
        ("####18 and #### 19", 18),
        ("####\n18", 18),
        ("#### 1,234", 1),
        ("#### 0.5", 0),
        ("#### -3", None),
        ("#### $18", None),
        ("The answer is 18", None),
        ("#### " + "9" * 5000, None),
    ],
    ids=lambda value: str(value)[:20],
)
def test_the_published_reader_ignores_signs_commas_and_decimals(text, number):
    assert published(text) == number


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (18, Fraction(18), True),
        (18, 19, False),
        (10**9, 10**9 + 1, False),
        (Fraction("0.333333"), Fraction(1, 3), True),
        (Fraction("0.33"), Fraction(1, 3), False),
        (Fraction("17.9999999"), 18, True),
        (Fraction("10000000.5"), 10000001, False),
        (Fraction("1e-9"), Fraction("2e-9"), False),
        (0, Fraction("1e-9"), False),
        (None, None, False),
        (None, 0, False),
        (0, None, False),
    ],
)
def test_numbers_are_compared_exactly_but_for_cut_decimals(one, other, same):
    assert same_number(one, other) is same
    assert same_number(other, one) is same


decimals = st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**12), max_value=10**12, places=2)
places = st.sampled_from(
    ["{}", "#### {}", "So 3 + 4 = 7.\n#### {}", "The answer is: {}.", "It takes 5 days and costs ${}", "\\boxed{{{}}}"]
)


@given(value=decimals, commas=st.booleans(), minus=st.sampled_from("-−"), place=places)
def test_a_number_written_down_is_read_back(value, commas, minus, place):
    text = place.format(f"{value:{',' if commas else ''}.2f}".replace("-", minus))
    assert robust(text) == Fraction(value)


@given(top=st.integers(-999, 999), bottom=st.integers(1, 999), latex=st.booleans(), place=places)
def test_a_fraction_written_down_is_read_back(top, bottom, latex, place):
    form = f"{'-' * (top < 0)}\\frac{{{abs(top)}}}{{{bottom}}}" if latex else f"{top}/{bottom}"
    assert robust(place.format(form)) == Fraction(top, bottom)


@given(number=st.integers(-(10**12), 10**12), tail=st.sampled_from(["", ".", " dollars.", "%", " eggs per day", ".00"]))
def test_what_follows_the_number_does_not_matter(number, tail):
    assert robust(f"The answer is {number:,}{tail}") == number


@given(st.text(alphabet="0123456789-+./,^$\\{}e %#=()x½²−\nanswer is:", max_size=80))
def test_no_text_breaks_a_reader(text):
    for reader in (robust, published):
        assert isinstance(reader(text), Fraction | None)


@pytest.mark.parametrize(
    "text",
    [
        "9" * 20000,
        "1,234" * 4000,
        "(" * 20000,
        "\\frac{" * 4000,
        "#### " * 4000,
        "1e999999999",
        "\\frac{" + " " * 4000,
        "\\frac{1}" + " " * 4000 + "{",
    ],
)
def test_text_of_a_model_in_a_loop_is_read_quickly(text):
    began = time.perf_counter()
    robust(text)
    assert time.perf_counter() - began < 2
