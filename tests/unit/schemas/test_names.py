"""Names from bytes: UTF-8 where it is valid, else Latin-1, percent forms decoded once, without folding."""

from __future__ import annotations

import random
import unicodedata
from typing import Literal

import pytest

from headrace_schemas.values.ids import decode_name, decode_path, decode_segment, is_name


def test_bytes_that_are_no_utf_8_are_read_as_latin_1() -> None:
    assert decode_name("müller".encode()) == decode_name("müller".encode("latin-1")) == "müller"
    assert decode_name("möller".encode("latin-1")) == "möller"
    assert decode_name(b"\xff\xfe") == "\xff\xfe"


def test_different_bytes_of_one_encoding_are_different_names() -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    raw = {bytes(rng.choices(range(0xA0, 0x100), k=3)) for _ in range(2000)}
    assert len({decode_name(name) for name in raw}) == len(raw), f"SEED={seed}"


@pytest.mark.parametrize("form", ["NFC", "NFD", "NFKC", "NFKD"])
def test_lookalikes_stay_different_names(form: Literal["NFC", "NFD", "NFKC", "NFKD"]) -> None:
    for name in ("Ⅷ", "ｍüller", "e\u0301", "é", "a\u200bb", "ﬁ", "Å", "STRASSE", "straße"):
        assert decode_name(name.encode()) == name
        assert decode_name(unicodedata.normalize(form, name).encode()) == unicodedata.normalize(form, name)


def test_percent_forms_are_decoded_once() -> None:
    assert decode_segment(b"m%C3%BCller") == decode_segment(b"m%FCller") == "müller"
    assert decode_segment(b"100%2525") == "100%25"
    assert decode_segment(b"a+b%zz%") == "a+b%zz%"
    assert decode_path(b"/v1/sessions/a%2Fb%FC/end") == "/v1/sessions/a/bü/end"


@pytest.mark.parametrize("name", ["a\n", "\x00", "a\x7f", "\x85", "a\x9b31m", "", "x" * 513, "\ud800"])
def test_a_name_has_no_control_characters_and_a_bounded_length(name: str) -> None:
    assert not is_name(name)


@pytest.mark.parametrize("name", ["a", " a", "a\u200b", "a\u202e", "\xa0", "x" * 512, "名"])
def test_other_text_is_a_name(name: str) -> None:
    assert is_name(name)
