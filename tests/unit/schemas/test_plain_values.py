"""Numbers and errors of users' programs, as other libraries make them."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from headrace_schemas import RewardResult
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
