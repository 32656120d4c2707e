"""Fixtures for the judge: a fake model for each test, and a worker that polls its queue without pauses."""

from tests.unit.judge.conftest import _eager, llm

__all__ = ["_eager", "llm"]
