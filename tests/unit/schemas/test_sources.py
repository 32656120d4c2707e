"""Only its owner can give rewards in the name of a judge, a reward function or a reward model."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from headrace_schemas import Feedback
from headrace_schemas.values import ids
from headrace_schemas.values.base import utcnow
from headrace_schemas.values.sources import RESERVED, owner_of, refusal_of

words = st.sampled_from(sorted(RESERVED))
ALIKE = {
    "a": "аɑ",
    "c": "сϲ",
    "d": "ԁ",
    "e": "еε3é",
    "g": "ɡց",
    "i": "іıí",
    "j": "јϳ",
    "l": "1|ӏ",
    "n": "ո",
    "o": "о0ö",
    "u": "սυü",
}
COLONS = ":：∶꞉﹕ː׃"
BLANKS = ("", " ", "\u200b", "\u2060", "\u00ad", "\u202e")


def feedback(**fields: Any) -> Feedback:
    key = ids.session_key("default", "s-1")
    return Feedback(time=utcnow(), feedback_id="f-1", session_key=key, session_id="s-1", **fields)


@st.composite
def disguised(draw: st.DrawFn) -> str:
    """A reserved word with other letters, cases, widths and invisible characters that people read as the word."""
    name = ""
    for letter in draw(words):
        wide = chr(ord(letter) + 0xFEE0)
        name += draw(st.sampled_from([letter, letter.upper(), wide, *ALIKE.get(letter, "")]))
        name += draw(st.sampled_from(BLANKS))
    return name


@given(disguised(), st.sampled_from(COLONS), st.text("abc:-", max_size=5))
def test_no_disguise_of_a_reserved_word_is_taken_as_a_source(word: str, colon: str, rest: str) -> None:
    for source in (word, f"{word}{colon}{rest}", f" {word} {colon} {rest}"):
        assert owner_of(source) in RESERVED.values(), ascii(source)
        with pytest.raises(ValidationError, match="is reserved for the"):
            feedback(source=source, value=1.0)


@given(disguised(), st.sampled_from(COLONS[1:]))
def test_no_metric_part_or_rater_speaks_in_the_name_of_a_service(word: str, colon: str) -> None:
    name = f"{word}{colon}helpfulness"
    for fields in ({"rater": name, "value": 1.0}, {"metric": name, "value": 1.0}, {"parts": {name: 1.0}}):
        with pytest.raises(ValidationError, match="is reserved for the"):
            feedback(**fields)


@pytest.mark.parametrize("form", [{"metric": "helpfulness", "value": 1.0}, {"parts": {"helpfulness": 1.0}}])
def test_a_metric_cannot_complete_a_reserved_source(form: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="is reserved for the judge"):
        feedback(source="judge", **form)


@pytest.mark.parametrize(
    "source",
    ["feedback", "reviewer", "judges", "prejudge", "judge-smith", "judge2:x", "my:judge:x", "functional"],
)
def test_names_of_ones_own_are_free(source: str) -> None:
    assert refusal_of(source) is None
    assert feedback(source=source, value=1.0, rater="judge", metric="judge").metric_source == f"{source}:judge"
