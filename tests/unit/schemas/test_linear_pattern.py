"""Regular expressions from outside are matched as Python matches them, and in linear time."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace_schemas.values.linear_pattern import PATTERN_LENGTH_MAX, fits_whole

ATOMS = [
    "a",
    "b",
    ".",
    r"\d",
    r"\w",
    r"\s",
    r"\S",
    "[ab]",
    "[^a]",
    "[[&]",
    "[]a]",
    "[a-]",
    r"[\]\d]",
    r"\.",
    "{",
    "}",
    "é",
]
COUNTS = ["", "", "", "*", "+", "?", "*?", "{2}", "{1,}", "{0,3}", "{,2}"]


def _patterns() -> st.SearchStrategy[str]:
    item = st.tuples(st.sampled_from(ATOMS), st.sampled_from(COUNTS)).map("".join)
    return st.recursive(
        st.lists(item, max_size=4).map("".join),
        lambda inner: st.lists(
            st.tuples(inner, inner, st.sampled_from(["", "?", "*", "{0,2}"])).map(
                lambda parts: f"(?:{parts[0]}|{parts[1]}){parts[2]}"
            ),
            max_size=2,
        ).map("".join),
        max_leaves=3,
    )


@settings(max_examples=1_500, deadline=None, print_blob=True)
@given(_patterns(), st.text("ab1 .{}[]&-é\n", max_size=6))
@example("<answer>.*</answer>", "<answer>\n7\n</answer>")
@example(r"a\Z", "a")
@example("", "")
@example("[[&~]", "[")
@pytest.mark.filterwarnings("ignore:Possible nested set:FutureWarning")
def test_fits_whole_agrees_with_python(pattern: str, text: str) -> None:
    try:
        expected = re.fullmatch(pattern, text, re.DOTALL) is not None
    except re.error:
        return
    assert fits_whole(text, pattern) == expected


@pytest.mark.parametrize(
    "pattern",
    [
        *("(?=a)a", "(?<!a)b", r"(a)\1", "(?P<x>a)(?P=x)", "a*+", "a{2}+", "(", "[", "*", "\x1b[31m(", "\ud800("),
        *("a" * (PATTERN_LENGTH_MAX + 1), "(?:a{100}){100}", "(((a{50}){50}){50}){50}", r"\w{1000}", "a{99999999}"),
    ],
)
def test_fits_whole_names_a_pattern_that_it_refuses(pattern: str) -> None:
    start = time.process_time()
    with pytest.raises(ValueError, match="regular expression '") as caught:
        fits_whole("a", pattern)
    assert time.process_time() - start < 1.0
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+b",
        "(?:a|aa)*b",
        "(a*)*b",
        "(.*a){20}b",
        ".*a.{300}c",
        "(?:.*a.{60}){30}c",
        r"(.*\w.{0,90}){0,20}c",
        "(a?){500}a{500}",
    ],
)
@pytest.mark.parametrize("pump", ["a", "ab", "aé"])
def test_fits_whole_is_over_within_two_seconds_or_refuses(pattern: str, pump: str) -> None:
    start = time.process_time()
    for length in (10, 1_000, 5_000, 1_000_000):
        try:
            fits_whole(pump * length, pattern)
        except ValueError as error:
            assert "states are too many" in str(error)  # noqa: PT017 - either way is right, and is over at once
    assert time.process_time() - start < 2.0
