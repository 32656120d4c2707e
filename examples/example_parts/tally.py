"""Counts of an agent's work, displayed on a terminal and written to a file."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from example_parts.react import Episode

FAILURES_MAX = 10
UPDATE_S, WRITE_S = 0.5, 1.0


class Tally:
    """Counts of tasks and requests. Requests are model calls and feedback; a request counts as failed after all
    retries.
    """

    def __init__(self, seed: int, task_words: str, accepted_words: str) -> None:
        self._words = task_words, accepted_words
        self.feedback_sent = 0
        self.feedback_refused = False
        """Whether the server has no feedback page."""
        self.failed_requests = 0
        self.failures: list[str] = []
        """Messages of the first failures."""
        self._seed = seed
        self._calls = 0
        self._tasks: Counter[str] = Counter()
        self._accepted: Counter[str] = Counter()
        self._began = time.monotonic()

    def count(self, kind: str, episode: Episode, *, accepted: bool) -> None:
        self._calls += episode.calls
        self._tasks[kind] += 1
        self._accepted[kind] += accepted
        if episode.failure is not None:
            self._add_failure(episode.failure)

    def feedback_failed(self, error: Exception) -> None:
        self.feedback_sent += 1
        self._add_failure(f"feedback: {type(error).__name__}: {error}")

    def line(self) -> str:
        count, accepted = self._tasks.total(), self._accepted.total()
        rate = self._calls / max(1e-9, time.monotonic() - self._began)
        note = ", no feedback taken" if self.feedback_refused else ""
        tasks = f"{count} {self._words[0]}, {accepted / max(1, count):.0%} {self._words[1]}"
        return f"{tasks}, {self._calls} model calls ({rate:.0f}/s), {self.failed_requests} failed{note}"

    def write(self, path: Path) -> None:
        summary = {
            "tasks": self._tasks.total(),
            "accepted": self._accepted.total(),
            "accepted_by_kind": {kind: self._accepted[kind] / count for kind, count in sorted(self._tasks.items())},
            "calls": self._calls,
            "feedback": self.feedback_sent,
            "feedback_taken": not self.feedback_refused,
            "requests": self._calls + self.feedback_sent,
            "failed_requests": self.failed_requests,
            "failures": self.failures,
            "wall_s": round(time.monotonic() - self._began, 3),
            "seed": self._seed,
        }
        draft = path.with_name(f".{path.name}")
        draft.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        draft.replace(path)

    @contextlib.asynccontextmanager
    async def written(self, path: Path | None) -> AsyncIterator[None]:
        """Write the counts to `path` during the block, once a second and at its end."""
        if path is None:
            yield
            return

        async def write_regularly(path: Path) -> None:
            while True:
                self.write(path)
                await asyncio.sleep(WRITE_S)

        task = asyncio.create_task(write_regularly(path))
        try:
            yield
        finally:
            task.cancel()
            self.write(path)

    @contextlib.contextmanager
    def displayed(self, *, enabled: bool) -> Iterator[None]:
        """Display one line on the terminal that is updated regularly."""
        if not enabled:
            yield
            return
        over = threading.Event()

        def update() -> None:
            while not over.wait(UPDATE_S):
                sys.stderr.write(f"\r\x1b[K{self.line()}")
                sys.stderr.flush()

        thread = threading.Thread(target=update, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            sys.stderr.write("\r\x1b[K")

    def _add_failure(self, message: str) -> None:
        self.failed_requests += 1
        if len(self.failures) < FAILURES_MAX:
            self.failures.append(message)
