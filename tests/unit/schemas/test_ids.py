"""Tests of ids and names, and of the token of a stack, which is sent only to addresses of this stack."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import unicodedata
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from headrace_schemas import Feedback
from headrace_schemas.http import stack_access
from headrace_schemas.http.stack_access import BusLogin, key_for, login_for, make_token, read_token
from headrace_schemas.values import ids
from headrace_schemas.values.base import utcnow
from headrace_schemas.values.ids import (
    RESERVED,
    decode_name,
    decode_path,
    decode_segment,
    derived_id,
    ingested_trajectory_id,
    is_name,
    key_of_response,
    owner_of,
    refusal_of,
    response_id,
    session_key,
    tenant_name,
    uuid7,
)

names = st.text(st.characters(blacklist_characters="\0"), max_size=40)


def test_uuid7_has_version_and_variant_and_sorts_by_time() -> None:
    early, late = uuid7(1_700_000_000_000), uuid7(1_700_000_000_001)
    assert early.version == 7
    assert early.variant == "specified in RFC 4122"
    assert str(early) < str(late)
    assert int(early.hex[:12], 16) == 1_700_000_000_000


@given(names, names)
def test_a_response_id_leads_to_its_session_key(tenant: str, session: str) -> None:
    key = session_key(tenant, session)
    response = response_id(key)
    assert key_of_response(response) == key
    assert len(response) <= 64, "Trinity's buffer keeps msg_id in VARCHAR(64)"


@given(names, names, names)
def test_tenants_never_share_a_session_key(tenant: str, other_tenant: str, session: str) -> None:
    assert (session_key(tenant, session) == session_key(other_tenant, session)) == (tenant == other_tenant)


@pytest.mark.parametrize("foreign", ["", "chatcmpl-abc", "chatcmpl-" + "a" * 16 + "-xyz", "x" * 500])
def test_foreign_ids_have_no_key(foreign: str) -> None:
    assert key_of_response(foreign) is None


def test_derived_ids_are_equal_for_equal_facts_only() -> None:
    assert derived_id("reward", "t", 1) == derived_id("reward", "t", 1)
    assert len({derived_id("reward", "t", 1), derived_id("reward", "t1"), derived_id("rewardt", 1)}) == 3
    assert re.fullmatch(r"[0-9a-f-]{36}", derived_id("x"))


def test_a_part_cannot_smuggle_the_separator() -> None:
    with pytest.raises(ValueError, match="NUL"):
        derived_id("reward", "a\0b")


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


_PARTS = ["a", "b", "a/b", "/", "a/", "/1/a", "1", "default", "tenant-aaaaaaaaaaaaaaaa/x", "é", "x" * 512]


def test_no_two_pairs_share_a_tenant_name() -> None:
    pairs = list(itertools.product(_PARTS, _PARTS))
    assert len({tenant_name(tenant, name) for tenant, name in pairs}) == len(pairs)


def test_tenant_names_of_plain_tenants_are_those_of_earlier_releases() -> None:
    assert tenant_name("acme", "task/1") == "acme/task/1"


def test_no_two_pairs_share_an_ingested_trajectory_id() -> None:
    pairs = list(itertools.product(_PARTS, _PARTS))
    names = {ingested_trajectory_id(tenant, name) for tenant, name in pairs}
    assert len(names) == len(pairs)
    assert max(map(len, names)) <= 512
    assert all(
        ingested_trajectory_id(tenant, ingested_trajectory_id(tenant, name)) == ingested_trajectory_id(tenant, name)
        for tenant, name in pairs
    )


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
    """Draw a reserved word disguised by look-alike letters, case, width and invisible characters."""
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


GATEWAY, BUS = "http://127.0.0.1:8000", "127.0.0.1:9092"


@pytest.fixture
def _nothing_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(stack_access, "_keys", {})
    monkeypatch.setattr(stack_access, "_logins", {})
    for name in [name for name in os.environ if name.startswith("HEADRACE_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def stack(_nothing_known: None, tmp_path: Path) -> Path:
    (tmp_path / ".headrace/run").mkdir(parents=True)
    state = {
        "bus": BUS,
        "services": {"gateway": {"url": GATEWAY}},
        "token_is_key": True,
        "token_is_password": True,
    }
    (tmp_path / ".headrace/run/state.json").write_text(json.dumps(state))
    return tmp_path / ".headrace"


def test_the_token_is_its_owners_alone_and_stays(stack: Path) -> None:
    token = make_token(stack)
    assert len(token) >= 40
    assert (stack / "run/token").stat().st_mode & 0o777 == 0o600
    assert make_token(stack) == read_token(stack) == token


def test_a_token_that_others_may_read_is_made_again(stack: Path) -> None:
    token = make_token(stack)
    (stack / "run/token").chmod(0o644)
    assert read_token(stack) == ""
    assert make_token(stack) not in ("", token)


def test_it_is_used_for_the_stacks_own_addresses_alone(stack: Path) -> None:
    token = make_token(stack)
    assert key_for(GATEWAY) == key_for(f"{GATEWAY}/v1/models") == token
    assert login_for(BUS) == BusLogin("headrace", token)
    for other in (
        "http://127.0.0.1:8001",
        "http://evil.example:8000",
        "http://127.0.0.1:8000@evil.example",
        "http://[",
    ):
        assert key_for(other) is None
    for other in ("kafka:9092", "127.0.0.1:9093", f"{BUS},evil.example:9092"):
        assert login_for(other) is None


def test_a_stack_with_a_key_of_its_own_has_another_one(stack: Path) -> None:
    make_token(stack)
    state = json.loads((stack / "run/state.json").read_text()) | {"token_is_key": False, "token_is_password": False}
    (stack / "run/state.json").write_text(json.dumps(state))
    assert (key_for(GATEWAY), login_for(BUS)) == (None, None)


def test_the_environment_wins(stack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_token(stack)
    monkeypatch.setenv("HEADRACE_SECURITY__INTERNAL_KEY", '"0123"')
    monkeypatch.setenv("HEADRACE_BUS__PASSWORD", "secret")
    monkeypatch.setenv("HEADRACE_BUS__MECHANISM", "SCRAM-SHA-512")
    assert key_for(GATEWAY) == "0123"
    assert login_for("kafka:9092") == BusLogin("headrace", "secret", "SCRAM-SHA-512")


def test_a_login_does_not_show_its_password() -> None:
    assert "secret" not in repr(BusLogin("headrace", "secret"))
    assert "secret" not in f"{BusLogin('headrace', 'secret')}"
