"""Trace of a run: a digest that two runs of one seed must share, and a text for people when one fails."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter


class Trace:
    """Record of the trace. Every line enters the digest; the text is stored when `verbose` is set."""

    def __init__(self, *, verbose: bool = False) -> None:
        self._digest = hashlib.sha256()
        self._verbose = verbose
        self.lines: list[str] = []
        self.counts: Counter[str] = Counter()
        """Lines by their first word."""

    def __call__(self, label: str, *facts: object, content: bytes = b"") -> None:
        """Note a fact. `content` goes into the digest and not into the text."""
        self.counts[label] += 1
        line = f"{asyncio.get_running_loop().time():.6f} {label} {' '.join(map(str, facts))}"
        self._digest.update(line.encode() + b"\0" + content + b"\n")
        if self._verbose:
            self.lines.append(line)

    def digest(self) -> str:
        return self._digest.hexdigest()
