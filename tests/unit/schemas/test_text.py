"""Tests of external text: `printable` for messages, `storable` for databases, removed secrets, and regular expressions.

Text without secrets stays readable. Regular expressions match as in Python, and in linear time.
"""

from __future__ import annotations

import re
import sys
import time
import unicodedata

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace_schemas.values.errors import HIDDEN, HeadraceError, Redactor, is_secret, redact, redact_value
from headrace_schemas.values.linear_pattern import PATTERN_LENGTH_MAX, matches_whole_text
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


@settings(max_examples=800, print_blob=True)
@given(any_text, lengths)
def test_printable_output_is_short_visible_and_stable(text: str, length_max: int) -> None:
    result = printable(text, length_max)
    assert len(result) <= length_max
    assert not any(unicodedata.category(character)[0] == "C" for character in result)
    assert not set(result) & {"\u2028", "\u2029"}
    assert printable(result, length_max) == result
    result.encode()


@settings(max_examples=500, print_blob=True)
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


@settings(max_examples=800, print_blob=True)
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


@pytest.mark.parametrize(
    "text",
    [
        "postgresql://me:PLANTED@db:5432/x is away",
        "postgresql+asyncpg://me:PLA@NTED@db/x",
        "s3://PUBLIC:PLANTED@bucket",
        "Authorization: Bearer PLANTED",
        "{'authorization': 'bearer PLANTED'}",
        "connect(host=db password=PLANTED)",
        "{'password': 'PLANTED', 'user': 'me'}",
        '{"api_key": "PLANTED"}',
        "?sslmode=require&password=PLANTED&x=1",
        "aws_secret_access_key = PLANTED",
    ],
)
def test_what_looks_like_a_secret_is_hidden(text: str) -> None:
    redacted_text = redact(text)
    assert "PLANTED" not in redacted_text
    assert "NTED" not in redacted_text
    assert HIDDEN in redacted_text


@pytest.mark.parametrize(
    "text",
    [
        "http://127.0.0.1:8000/v1: connection refused",
        "tokens: 17, max_tokens=256",
        "session_key=0f3a of session s-1",
        "setting gateway.port = 70000: too large",
        "file:///data/blobs: no space left",
    ],
)
def test_the_rest_stays_as_it_is(text: str) -> None:
    assert redact(text) == text


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("security.internal_key", True),
        ("security.internal_kye", True),
        ("HEADRACE_SECURITY__INTERNAL_KEY", True),
        ("OPENAI_API_KEY", True),
        ("PGPASSWORD", True),
        ("gateway.keys.sha256", True),
        ("gateway.port", False),
        ("judge.max_tokens", False),
        ("gateway.keys", False),
        ("trainer.memory.sequence_tokens", False),
        ("judge.endpoint.api_key_env", False),
    ],
)
def test_a_name_tells_a_secret(name: str, secret: bool) -> None:
    assert is_secret(name) is secret


def test_a_value_is_shown_without_the_secrets_inside_it() -> None:
    assert redact_value("security.internal_key", 123456) == HIDDEN
    assert redact_value("database", {"url": "postgresql://me:PLANTED@db/x", "pool": 3}) == (
        "{'url': 'postgresql://me:(hidden)@db/x', 'pool': 3}"
    )
    assert redact_value("gateway", {"port": 1, "api_key": "PLANTED"}) == "{'port': 1, 'api_key': '(hidden)'}"


def test_known_secrets_are_hidden_wherever_they_stand() -> None:
    clean = Redactor(["PLANTED", "4711471147114711", "", "ab"])
    assert clean("x4711471147114711y PLANTED abc") == "x(hidden)y (hidden) abc"


def test_every_error_of_ours_is_clean() -> None:
    assert str(HeadraceError("bus kafka://me:PLANTED@host:1 is away")) == "bus kafka://me:(hidden)@host:1 is away"


@pytest.mark.parametrize(
    "pump",
    [
        "a-",
        "a.",
        "://",
        "a://b:",
        "a://u:p@",
        "bearer ",
        " ",
        'token="',
        "token='",
        "token ",
        "password=",
        "_",
        "key",
        "\x00",
    ],
)
@pytest.mark.parametrize("prefix", ["", "bearer", "token", "a://b:", 'secret="'])
def test_redaction_time_is_linear_and_bounded(prefix: str, pump: str) -> None:
    text = prefix + pump * (4_000_000 // len(pump))
    start = time.process_time()
    redact(text)
    is_secret(text)
    redact_value(text, text)
    str(HeadraceError(text))
    assert time.process_time() - start < 0.5


@pytest.mark.parametrize("at", range(-40, 41))
@pytest.mark.parametrize("template", ["a://user:{}@host", 'password="{}"', "token: {}", "Bearer {}"])
def test_a_cut_does_not_uncover_a_secret(template: str, at: int) -> None:
    cut = 65_536
    text = "x" * (cut - 20 + at - 1) + " " + template.format("PLANTED/PLANTED") + " tail" * 20
    assert "PLANT" not in redact(text)
    assert "PLANT" not in str(HeadraceError(text[60_000:]))


def test_error_messages_are_cut_and_cleaned() -> None:
    message = str(HeadraceError("line 1\nline 2 \x1b[31m\u202e\x9b\x00\ud800" + "x" * 100_000))
    assert message.startswith("line 1\nline 2 \\x1b[31m\\u202e\\x9b\\x00\\ud800xxx")
    assert len(message) < 8_100
    message.encode()


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


@settings(max_examples=600, print_blob=True)
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
    assert matches_whole_text(text, pattern) == expected


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
        matches_whole_text("a", pattern)
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
            matches_whole_text(pump * length, pattern)
        except ValueError as error:
            assert "states are too many" in str(error)  # noqa: PT017 - either way is right, and is over at once
    assert time.process_time() - start < 2.0
