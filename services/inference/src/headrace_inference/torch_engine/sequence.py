"""One choice while it is sampled. Its tokens define it; its KV can be dropped and computed again."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from headrace_inference.engine import Finish, Guide, Sampling, Tokens
from headrace_inference.errors import EngineFailed
from headrace_inference.torch_engine.prefix import Entry
from headrace_runtime.logs import get_logger

log = get_logger(__name__)


@dataclass(slots=True, eq=False)
class Sequence:
    """Owned by the worker's thread once submitted."""

    owner: object
    """The generation that the tokens are delivered to; it lives and dies as a whole."""
    choice: int
    tokens: list[int]
    """Prompt, resumed and sampled tokens."""
    prompt_length: int
    limit: int
    """Length of `tokens` at which it ends with `length`."""
    sampling: Sampling
    seed: int
    stream: bool
    resumed: int = 0
    until: Callable[[int], bool] | None = None
    guide: Guide | None = None
    """Stays with the sequence when that is set back: it knows all of its tokens."""
    salt: str = ""
    """Whose KV it may go on from: it stands for a tenant."""
    session: str = ""
    """What the rows of a tenant are shared by."""
    background: bool = False
    """Whether it is an evaluation, which gets what users leave."""
    followers: list[Sequence] = field(default_factory=list)
    """Choices of the same prompt that wait for its KV."""

    logprobs: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    filled: int = 0
    """Tokens whose KV is in the row."""
    cached: int = 0
    source: Entry | None = None
    """The cache entry that it continues as a whole."""
    arrival: int = 0
    ended: bool = False
    """Its last tokens, or the reason of its failure, are delivered or about to be."""
    fault: str = ""
    """Why its grammar cannot go on, where the grammar itself could not report it."""

    @property
    def tenant(self) -> tuple[bool, str]:
        """Whose rows it takes; background work counts apart."""
        return self.background, self.salt

    @property
    def drawn(self) -> int:
        """Tokens drawn so far: the place in its stream of random numbers."""
        return len(self.tokens) - self.prompt_length

    def accept(self, token: int, logprob: float) -> Finish | None:
        """Take a sampled token; says whether and why the sequence ends with it."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if token in self.sampling.stop_ids:
            return "stop"
        if self.guide is not None:
            self.guide.accept(token)
        if self.until is not None and self.until(token):
            return "stop"
        return "length" if len(self.tokens) >= self.limit else None

    def advance(
        self, token: int, logprob: float, ranked: list[tuple[int, float]] | None, version: str
    ) -> Tokens | EngineFailed | None:
        """Take a sampled token and return what to deliver, or end with a failure of this sequence alone."""
        if not math.isfinite(logprob):  # overflow, weights that went astray, or a grammar that allows no token
            return self._fail(version, self.fault or (self.guide and self.guide.error) or "the logits are no numbers")
        try:
            if ranked is not None:
                self.top.append(ranked)
            finish = self.accept(token, logprob)
        except Exception as error:
            log.exception("sequence_failed", version=version)
            return self._fail(version, f"{type(error).__name__} while reading a token")
        self.filled += 1
        self.ended = finish is not None
        return self.news(finish)

    def _fail(self, version: str, reason: str) -> EngineFailed:
        self.ended = True
        self.filled = 0  # its KV may be no numbers, and is kept for nobody
        return EngineFailed(f"{version}: {reason} after {len(self.tokens)} tokens")

    def news(self, finish: Finish | None) -> Tokens | None:
        """What to deliver after a step: each token when streaming, everything at the end otherwise."""
        if self.stream:
            last = self.top[-1:] if self.sampling.top_logprobs else []
            return Tokens(self.choice, self.tokens[-1:], self.logprobs[-1:], last, finish, self.cached)
        if finish is None:
            return None
        begin = self.prompt_length + self.resumed
        return Tokens(self.choice, self.tokens[begin:], self.logprobs, self.top, finish, self.cached)
