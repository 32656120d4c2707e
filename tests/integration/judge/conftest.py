"""A fake model for each test, and a worker that does not wait between looks at its queue."""

from tests.unit.judge.conftest import _eager, llm

__all__ = ["_eager", "llm"]
