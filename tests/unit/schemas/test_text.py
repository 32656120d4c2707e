"""Text from outside: `printable` for messages, `storable` for databases."""

from __future__ import annotations

import sys
import time
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_schemas.values.text import is_storable, printable, storable

HIDING = (
    [chr(code) for code in (*range(0x20), *range(0x7F, 0xA0))]
    + [chr(code) for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F, 0x061C)]
    + list("\u00ad\u200b\u200c\u200d\u2060\ufeff\u2028\u2029\ud800\udfff\u0378\ufffe\ue000\U000e0041\u3164\u115f\u2800")
)
"""Controls, bidi, zero width, separators, surrogates, unassigned, private use, tags, letters without ink."""

any_text = st.text(st.characters() | st.characters(categories=["Cc", "Cf", "Cs", "Cn"]) | st.sampled_from(HIDING))
lengths = st.integers(48, 300)


@pytest.mark.parametrize("character", HIDING, ids=lambda character: f"U+{ord(character):04X}")
def test_printable_shows_the_code_of_a_hidden_character(character: str) -> None:
    result = printable(f"a{character}b")
    assert result.isascii()
    assert result.isprintable()
    assert result.encode().decode("unicode_escape") == f"a{character}b"


@pytest.mark.parametrize("text", ["", "plain", "naïve Ünïcode 中文　日本語 עברית 🙂 e\u0301", r"C:\x1b\new", "\xa0"])
def test_printable_keeps_readable_text(text: str) -> None:
    assert printable(text) == text


@settings(max_examples=2_000, deadline=None, print_blob=True)
@given(any_text, lengths)
def test_printable_output_is_short_visible_and_stable(text: str, length_max: int) -> None:
    result = printable(text, length_max)
    assert len(result) <= length_max
    assert not any(unicodedata.category(character)[0] == "C" for character in result)
    assert not set(result) & {"\u2028", "\u2029"}
    assert printable(result, length_max) == result
    result.encode()


@settings(max_examples=500, deadline=None, print_blob=True)
@given(st.integers(1, 10_000), st.sampled_from(["a", "\x1b", "\u202e", "\U000e0041", "ü"]), lengths)
def test_printable_states_how_many_characters_it_cut(count: int, character: str, length_max: int) -> None:
    result = printable(character * count, length_max)
    code = printable(character)
    if count * len(code) <= length_max:
        assert result == code * count
        return
    body, _, mark = result.partition("... (")
    assert body == code * (len(body) // len(code)), "the cut is between characters"
    assert mark == f"{count - len(body) // len(code)} more characters)"


def test_printable_refuses_a_length_without_room_for_the_mark() -> None:
    with pytest.raises(ValueError, match="length_max = 10"):
        printable("text", 10)


@pytest.mark.parametrize("text", ["a-" * 9_000_000, "\x1b[31m" * 4_000_000])
def test_printable_reads_only_what_it_shows(text: str) -> None:
    start = time.process_time()
    for _ in range(100):
        printable(text)
    assert time.process_time() - start < 0.5


@settings(max_examples=2_000, deadline=None, print_blob=True)
@given(any_text)
def test_storable_replaces_nul_and_surrogates_alone(text: str) -> None:
    stored = storable(text)
    assert is_storable(stored)
    assert storable(stored) == stored
    assert (stored == text) == is_storable(text)
    assert len(stored) == len(text)
    for before, after in zip(text, stored, strict=True):
        expected = "\ufffd" if before == "\x00" or unicodedata.category(before) == "Cs" else before
        assert after == expected
    assert "\x00" not in stored.encode().decode()


def test_storable_judges_every_code_point_as_utf_8_does() -> None:
    for code in range(1, sys.maxunicode + 1):
        character = chr(code)
        try:
            character.encode()
        except UnicodeEncodeError:
            assert not is_storable(character), hex(code)
        else:
            assert is_storable(character), hex(code)
