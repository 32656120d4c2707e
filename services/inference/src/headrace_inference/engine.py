"""The interface of an engine: it takes token ids and returns sampled tokens with their logprobs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from headrace_inference.errors import PromptEmpty, TokenOutOfVocabulary
from headrace_schemas import Probe
from headrace_schemas.manifest import Manifest
from headrace_schemas.resume import FIELD as RESUME
from headrace_schemas.scoring import TokensToScore

Finish = Literal["stop", "length"]


class Guide(Protocol):
    """Holds one choice to a grammar. Owned by whoever samples the choice, in one thread at a time."""

    @property
    def error(self) -> str:
        """Why it cannot go on; empty while it can. It has to be asked after each of the two calls."""

    def allowed(self) -> NDArray[np.int32]:
        """The tokens that may come next, a bit each, lowest first: token `t` is bit `t % 32` of word `t // 32`. The
        array is its own and changes with the next call. It must be quick: a step waits for it."""

    def accept(self, token: int) -> None:
        """`token` was sampled. One that ends the choice need not be told."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the completions of one prompt are sampled; nothing comes from a model's `generation_config`."""

    max_tokens: int | None = None
    """None: up to the end of the context."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    """Penalties count sampled tokens, not those of the prompt."""
    seed: int | None = None
    """Equal seeds give equal tokens for an equal prompt, whatever else is in the batch; None draws one."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end a completion; they belong to it."""
    top_logprobs: int = 0
    grammar: str = ""
    """What the choices are held to, in llguidance's dialect of Lark; each has a `Start.guide` then. Empty: nothing."""


@dataclass(frozen=True, slots=True)
class Start:
    """How one choice begins."""

    choice: int = 0
    """Its number; a seeded choice draws the same tokens whichever others are asked for."""
    resumed: Sequence[int] = ()
    """Tokens that were sampled elsewhere; the choice goes on after them and counts them."""
    until: Callable[[int], bool] | None = None
    """Called by the engine, in any thread, with each new token in order up to a stop token; True ends the choice with
    `stop`. It has already seen the resumed tokens. It must be quick and must not raise."""
    guide: Guide | None = None
    """Holds the choice to `Sampling.grammar`. It has already accepted the resumed tokens."""


@dataclass(frozen=True, slots=True)
class Share:
    """Whose generation it is: what an engine shares its places and its time by."""

    salt: str = ""
    """It stands for a tenant. What is kept of a prompt is used again for prompts of the same salt alone."""
    session: str = ""
    background: bool = False
    """Evaluations get what users leave."""

    @property
    def tenant(self) -> tuple[bool, str]:
        """Users and evaluations of a tenant count apart."""
        return self.background, self.salt


NOBODY = Share()


@dataclass(slots=True)
class Tokens:
    """What was sampled for one choice since it was last asked for. `len(token_ids) == len(logprobs)`."""

    choice: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Nats, float32, of the distribution that was sampled from: after grammar, penalties, temperature and truncation.
    Greedy choices report those at temperature 1."""
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    """The most likely tokens at each position, best first; empty unless asked for."""
    finish: Finish | None = None
    cached_tokens: int = 0
    """Prompt tokens whose KV was already there."""

    def add(self, more: Tokens) -> None:
        """Take in what came later for the same choice."""
        self.token_ids += more.token_ids
        self.logprobs += more.logprobs
        self.top += more.top
        self.finish = more.finish
        self.cached_tokens = max(self.cached_tokens, more.cached_tokens)


class Generation(Protocol):
    """The choices of one prompt while they are sampled: iterate until all are finished.

    Raises `EngineFailed` when the engine broke. `close` aborts what is unfinished; it may be called at any time.
    """

    def __aiter__(self) -> AsyncIterator[Tokens]: ...

    def close(self) -> None: ...


@runtime_checkable
class AnswerScorer(Protocol):
    """What an engine may have besides."""

    async def score(self, version: str, answers: Sequence[TokensToScore]) -> list[list[float]]:
        """The logprobs of given tokens after given prompts, after the temperature. Users' answers go before.

        Raises `UnknownVersion` or `ContextLengthExceeded`.
        """


class Engine(Protocol):
    """Several immutable versions side by side. All methods are called from one event loop."""

    name: str
    capacity: int
    """Sequences that run at a time without waiting."""
    resumes: bool
    """It takes `Start`s that have tokens already. A stock vLLM server does not."""
    grammars: bool
    """It holds choices to `Sampling.grammar`."""

    async def load(self, folder: Path, manifest: Manifest) -> None:
        """Make a version ready to generate while others go on generating.

        Raises `VersionUnusable`. A LoRA version needs its base loaded before it.
        """

    async def unload(self, version: str) -> None:
        """Forget a version; what still generates with it fails with `EngineFailed`."""

    async def probe(self, version: str) -> Probe:
        """Compare what the loaded weights answer with the manifest's fingerprint and with the parent's answer."""

    def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        version: str,
        starts: Sequence[Start],
        *,
        stream: bool,
        share: Share = NOBODY,
    ) -> Generation:
        """Begin one choice for each of `starts`. Without `stream` each choice arrives in one piece, which is cheaper.

        Raises `UnknownVersion`, `ContextLengthExceeded`, `Overloaded`, or what `check_tokens` raises, at once.
        """

    def in_flight(self, version: str | None = None) -> int:
        """Unfinished choices, of one version or of all."""

    async def drained(self, version: str | None = None) -> None:
        """Returns once nothing is in flight."""

    def context_tokens(self, version: str) -> int:
        """Longest prompt plus completion."""

    def vocabulary(self, version: str) -> int:
        """Token ids are below this."""

    @property
    def alive(self) -> bool:
        """Whether the engine can still answer."""

    def check(self) -> None:
        """Raises `EngineFailed` when the engine will never answer again."""

    async def stop(self) -> None:
        """Nothing generates afterwards."""


def check_tokens(prompt: Sequence[int], starts: Sequence[Start], vocabulary: int) -> None:
    """Raise `PromptEmpty` or `TokenOutOfVocabulary` for what no model could compute, before it is in a batch with what
    others asked for."""
    if not prompt:
        raise PromptEmpty
    for name, ids in (("messages", prompt), *((RESUME, start.resumed) for start in starts)):
        outside = next((token for token in ids if not 0 <= token < vocabulary), None)
        if outside is not None:
            raise TokenOutOfVocabulary(outside, vocabulary, name)
