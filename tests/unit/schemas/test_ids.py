"""Ids: ordered, deterministic, self-routing."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_schemas.values.ids import derived_id, key_of_response, response_id, session_key, uuid7

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
