"""Packed and plain arrays are the same array, bit for bit."""

from __future__ import annotations

import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from headrace_schemas.values.arrays import Logprobs, TokenIds, pack_float32, pack_int32

IDS: TypeAdapter[tuple[int, ...]] = TypeAdapter(TokenIds)
LOGPROBS: TypeAdapter[tuple[float, ...]] = TypeAdapter(Logprobs)
ids = st.lists(st.integers(0, 2**31 - 1), max_size=50)
logprobs = st.lists(st.floats(-(2.0**99), 0, width=32), max_size=50)


@given(ids)
def test_both_forms_of_ids_are_read_alike(values: list[int]) -> None:
    assert IDS.validate_json(json.dumps(values)) == IDS.validate_json(json.dumps(pack_int32(values))) == tuple(values)


@given(logprobs)
def test_both_forms_of_logprobs_are_read_alike(values: list[float]) -> None:
    plain = LOGPROBS.validate_json(json.dumps(values))
    packed = LOGPROBS.validate_json(json.dumps(pack_float32(values)))
    assert struct.pack(f"<{len(values)}f", *plain) == struct.pack(f"<{len(packed)}f", *packed)


@given(st.lists(st.floats(-1e30, 0), max_size=50))
def test_plain_doubles_are_rounded_once(values: list[float]) -> None:
    once = LOGPROBS.validate_python(values)
    assert LOGPROBS.validate_json(LOGPROBS.dump_json(once)) == once


def test_the_packed_form_is_little_endian() -> None:
    assert IDS.dump_json((1, 256)) == b'"AQAAAAABAAA="'


@pytest.mark.parametrize("value", ["AQ==", "no base64!", [-1], [2**31], [1.5], "/////w==", {"a": 1}])
def test_bad_ids_are_refused(value: object) -> None:
    with pytest.raises(ValidationError):
        IDS.validate_python(value)


@pytest.mark.parametrize("value", [[0.5], [float("nan")], [float("-inf")], [-1e39], ["x"], pack_float32([1.0])])
def test_bad_logprobs_are_refused(value: object) -> None:
    with pytest.raises(ValidationError):
        LOGPROBS.validate_python(value)
