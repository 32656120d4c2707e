"""Programs of `make check NAME=parity` that need no services: signatures, records, conversions and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.page import PAGE, expected_ids, items, problems
from tests.parity.programs import ALL
from tests.parity.stage import PROGRAMS, Stage

FAST = [
    "imports", "records", "signals", "rewards", "pipeline", "accelerate", "convert", "keys", "objects", "choosing",
    "isolation",
]  # fmt: skip
assert len(ALL) > 1


@pytest.mark.parametrize("name", FAST)
def test_the_program_does_what_the_document_says(name: str, tmp_path: Path) -> None:
    PROGRAMS[name](Stage(tmp_path))


def test_parity_page_has_every_item_and_existing_names() -> None:
    assert problems(items(), set(PROGRAMS)) == []
    assert {item.program for item in items()} == set(PROGRAMS), "a program that shows nothing"


def test_planted_errors_of_the_page_are_reported() -> None:
    text = PAGE.read_text(encoding="utf-8")
    first = next(line for line in text.splitlines() if line.startswith("| S0-01"))
    for wrong, problem in (
        ("", "S0-01 is missing"),
        (first + "\n" + first, "S0-01 is listed twice"),
        (first.replace("headrace.rl.OnlineTrainer", "headrace.rl.Nothing"), "nothing is at headrace.rl.Nothing"),
        (first.replace("loop", "loops"), "there is no program loops"),
    ):
        assert any(problem in line for line in problems(items(text.replace(first, wrong)), set(PROGRAMS)))
    refused = items(text.replace("| same |", "| not |"))
    assert any("at most 6" in line for line in problems(refused, set(PROGRAMS)))
    assert len(list(expected_ids())) == 158
