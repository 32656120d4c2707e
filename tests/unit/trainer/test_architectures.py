"""Architectures with special code are supported as docs/models.md claims; `make check NAME=architectures` checks all of
them."""

from __future__ import annotations

import pytest

from tests.architectures import page
from tests.architectures.catalog import CATALOG, Architecture
from tests.architectures.trial import play

TRIED = ("Llama 4, temperature by position", "Gemma 3", "GPT-OSS", "Qwen 3 Next", "Falcon, ALiBi", "Mamba")


def test_the_page_has_every_architecture_and_the_catalogue_is_large() -> None:
    assert list(page.verdicts(page.written())) == [architecture.name for architecture in CATALOG]
    assert len(CATALOG) >= 25


@pytest.mark.parametrize(
    "architecture", [case for case in CATALOG if case.name in TRIED], ids=lambda case: str(case.name)
)
def test_an_architecture_stands_as_the_page_says(architecture: Architecture) -> None:
    trial = play(architecture)
    assert all(outcome.spoken for outcome in trial.outcomes.values())
    assert page.verdicts(page.table([trial]))[trial.name] == page.verdicts(page.written())[trial.name]


def test_every_part_of_the_check_has_an_architecture() -> None:
    assert {architecture.name for architecture in CATALOG} >= set(TRIED)
