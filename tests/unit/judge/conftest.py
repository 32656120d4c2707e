"""Fixtures for the judge: a fake model for each test, and a worker that polls its queue without pauses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headrace_judge import worker
from tests.support.fake_llm import FakeLLM, verdict


@pytest.fixture
def llm() -> Iterator[FakeLLM]:
    with FakeLLM(verdict(outcome=5, grounding=4, conduct=3, clarity=2)) as server:
        yield server


@pytest.fixture(autouse=True)
def _eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_POLL_S", 0.01)
