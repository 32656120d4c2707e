"""What happened, in order: a digest that two runs of one seed must share, and a story for people when one fails."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter


class Trace:
    """Every line counts towards the digest; the text is kept when somebody wants to read it."""

    def __init__(self, *, verbose: bool = False) -> None:
        self._digest = hashlib.sha256()
        self._verbose = verbose
        self.lines: list[str] = []
        self.counts: Counter[str] = Counter()
        """Lines by their first word."""

    def __call__(self, what: str, *facts: object, content: bytes = b"") -> None:
        """Note a fact. `content` goes into the digest and not into the text."""
        self.counts[what] += 1
        line = f"{asyncio.get_running_loop().time():.6f} {what} {' '.join(map(str, facts))}"
        self._digest.update(line.encode() + b"\0" + content + b"\n")
        if self._verbose:
            self.lines.append(line)

    def digest(self) -> str:
        return self._digest.hexdigest()
