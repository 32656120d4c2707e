"""Counts what happens while the agent works, tells it on a terminal and writes it down."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from example_parts.react import Episode

FAILURES_KEPT = 10
TELL_EVERY_S = 0.5


class Tally:
    """Requests are model calls and feedback; a failed one is one that the client gave up after its own retries."""

    def __init__(self, seed: int, asked: str, accepted: str) -> None:
        self._words = asked, accepted
        self.feedback_sent = 0
        self.feedback_refused = False
        """The server takes none."""
        self.failed_requests = 0
        self.failures: list[str] = []
        """The first few, in words."""
        self._seed = seed
        self._calls = 0
        self._asked: Counter[str] = Counter()
        self._accepted: Counter[str] = Counter()
        self._began = time.monotonic()

    def count(self, kind: str, episode: Episode, *, accepted: bool) -> None:
        self._calls += episode.calls
        self._asked[kind] += 1
        self._accepted[kind] += accepted
        if episode.failure is not None:
            self._failed(episode.failure)

    def feedback_failed(self, error: Exception) -> None:
        self.feedback_sent += 1
        self._failed(f"feedback: {type(error).__name__}: {error}")

    def line(self) -> str:
        asked, accepted = self._asked.total(), self._accepted.total()
        rate = self._calls / max(1e-9, time.monotonic() - self._began)
        note = ", no feedback taken" if self.feedback_refused else ""
        told = f"{asked} {self._words[0]}, {accepted / max(1, asked):.0%} {self._words[1]}"
        return f"{told}, {self._calls} model calls ({rate:.0f}/s), {self.failed_requests} failed{note}"

    def write(self, path: Path) -> None:
        summary = {
            "tasks": self._asked.total(),
            "accepted": self._accepted.total(),
            "accepted_by_kind": {kind: self._accepted[kind] / count for kind, count in sorted(self._asked.items())},
            "calls": self._calls,
            "feedback": self.feedback_sent,
            "feedback_taken": not self.feedback_refused,
            "requests": self._calls + self.feedback_sent,
            "failed_requests": self.failed_requests,
            "failures": self.failures,
            "wall_s": round(time.monotonic() - self._began, 3),
            "seed": self._seed,
        }
        path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")

    @contextlib.contextmanager
    def told(self, *, enabled: bool) -> Iterator[None]:
        """One line on the terminal that keeps itself up to date."""
        if not enabled:
            yield
            return
        over = threading.Event()

        def tell() -> None:
            while not over.wait(TELL_EVERY_S):
                sys.stderr.write(f"\r\x1b[K{self.line()}")
                sys.stderr.flush()

        teller = threading.Thread(target=tell, daemon=True)
        teller.start()
        try:
            yield
        finally:
            over.set()
            teller.join()
            sys.stderr.write("\r\x1b[K")

    def _failed(self, what: str) -> None:
        self.failed_requests += 1
        if len(self.failures) < FAILURES_KEPT:
            self.failures.append(what)
