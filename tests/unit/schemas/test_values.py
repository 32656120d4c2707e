"""Numbers and errors of users' programs, as other libraries make them.

Packed and plain arrays are the same array, bit for bit.
"""

from __future__ import annotations

import json
import math
import random
import struct
import subprocess
import sys
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from headrace_schemas import RewardResult
from headrace_schemas.values.arrays import Logprobs, TokenIds, pack_float32, pack_int32
from headrace_schemas.values.plain_values import describe_error, plain_number, plain_value, stop_strings

DTYPES = [np.bool_, np.int8, np.int64, np.uint8, np.float16, np.float32, np.float64, np.longdouble]
TENSORS = [torch.bool, torch.int32, torch.float16, torch.bfloat16, torch.float32, torch.float64]


def forms(number: int) -> list[Any]:
    """Return a number in the forms that programs return it in."""
    plain: list[Any] = [number, float(number), Decimal(number), Fraction(number), bool(number)]
    arrays: list[Any] = [dtype(number) for dtype in DTYPES] + [np.array(number, dtype=dtype) for dtype in DTYPES]
    tensors: list[Any] = [torch.tensor(number, dtype=dtype) for dtype in TENSORS]
    return [*plain, *arrays, *tensors, torch.tensor(float(number), requires_grad=True)]


@pytest.mark.parametrize("number", [0, 1])
def test_every_form_of_a_number_is_taken(number: int) -> None:
    for form in forms(number):
        assert plain_number(form) == number, repr(form)
        assert RewardResult(value=form, criteria={"a": form}, turns={"t": form}).value == number
        assert plain_value(form) == number
        assert type(plain_value(form)) in (bool, int, float)


def test_random_numbers_keep_their_value() -> None:
    seed = 4
    print(f"seed {seed}")
    chance = random.Random(seed)
    for _ in range(500):
        number = chance.uniform(-1, 1) * 10 ** chance.uniform(-6, 5)
        for form in (np.float64(number), np.array(number), torch.tensor(number, dtype=torch.float64), Decimal(number)):
            assert plain_number(form) == number


REFUSED: list[Any] = [
    "1.0", b"1", None, [], [1.0], {}, 1j, object(), np.array([1.0]), np.zeros((0,)), torch.zeros(1), torch.zeros(2, 2),
    np.str_("1"), np.array("1"), np.array(1j), np.datetime64("2026-01-01"), np.timedelta64(3, "ns"),
    np.array(None), type("Lazy", (), {"__float__": float})(),
    float("nan"), math.inf, Decimal("NaN"), Decimal("sNaN"), Decimal("Infinity"), Decimal(10) ** 400, 10**400,
    Fraction(10**400), np.float32("inf"), torch.tensor(math.nan), np.ma.masked,
]  # fmt: skip


@pytest.mark.parametrize("value", REFUSED, ids=range(len(REFUSED)))
def test_what_is_no_single_finite_number_is_refused(value: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        plain_number(value)


def test_no_library_is_imported() -> None:
    code = (
        "import sys; from headrace_schemas.values import plain_values; plain_values.plain_number(1.5);"
        "assert not {'numpy', 'torch', 'pandas', 'jax'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


class Silent(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Exiting(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


class NoText(Exception):
    def __str__(self) -> str:
        return 7  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("bad \ud83d end"), "ValueError: bad \ufffd end"),
        (ValueError("a\x00b"), "ValueError: a\ufffdb"),
        (ValueError(), "ValueError"),
        (Silent(), "Silent: (its text cannot be read: RuntimeError)"),
        (Exiting(), "Exiting: (its text cannot be read: SystemExit)"),
        (NoText(), "NoText: (its text cannot be read: TypeError)"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "x"), "UnicodeDecodeError: 'utf-8' codec"),
        (type("E" * 9999, (Exception,), {})("x"), "E" * 100 + ": x"),
    ],
)
def test_an_error_is_described_whatever_its_text_is(error: Exception, text: str) -> None:
    description = describe_error(error)
    assert description.startswith(text)
    description.encode()


def test_a_huge_error_is_cut() -> None:
    assert len(describe_error(ValueError("x" * 10**7))) < 2100


@pytest.mark.parametrize(
    ("stop", "expected"),
    [("", None), ([], None), ("x", ("x",)), (["a", "b"], ("a", "b")), (None, None)],
)
def test_empty_stop_strings_ask_for_nothing(stop: Any, expected: Any) -> None:
    assert stop_strings(stop) == expected


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
