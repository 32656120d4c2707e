"""Interface of an engine, which takes token ids and returns sampled tokens with their logprobs, and the registry of
engines.

An entry point must be fast to import; only `make` imports the engine, and torch with it. The engine's attributes
describe its abilities (`Engine.resumes`, `Engine.capacity`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from headrace_inference.errors import PromptEmpty, TokenOutOfVocabulary
from headrace_runtime.registries import Registry
from headrace_runtime.settings.sections import Section
from headrace_schemas import Probe
from headrace_schemas.http.replica_api import RESUME_FIELD as RESUME
from headrace_schemas.http.replica_api import TokensToScore
from headrace_schemas.values.blobs import Manifest

Finish = Literal["stop", "length"]


class Guide(Protocol):
    """State of a grammar while one choice is sampled, which determines the tokens that are allowed next.

    Only the sampler of the choice uses it, in one thread at a time.
    """

    @property
    def error(self) -> str:
        """Reason why the guide has failed, or an empty text. Check it after each call of `allowed` and `accept`."""

    def allowed(self) -> NDArray[np.int32]:
        """Return the tokens that may come next as a bit mask: token `t` is bit `t % 32` of word `t // 32`.

        The guide owns the array and changes it with the next call. The method must be fast, because a step waits for
        it.
        """

    def accept(self, token: int) -> None:
        """Record a sampled token. A token that ends the choice need not be recorded."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of the completions of one prompt. The model's `generation_config` is not used."""

    max_tokens: int | None = None
    """None samples up to the end of the context."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all tokens."""
    min_p: float = 0.0
    """Smallest probability of a token, as a share of that of the most likely one. 0 keeps all tokens."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    """Penalties count sampled tokens, not those of the prompt."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token ids, each with what is added to its logit."""
    seed: int | None = None
    """Equal seeds give equal tokens for an equal prompt, independent of the batch. None draws a random seed."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end a completion. They are part of it."""
    top_logprobs: int = 0
    grammar: str = ""
    """Grammar of the choices in llguidance's dialect of Lark. Each choice then has a `Start.guide`. Empty: none."""

    @property
    def truncated(self) -> bool:
        """Whether unlikely tokens are excluded."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


@dataclass(frozen=True, slots=True)
class Start:
    """Initial state of one choice."""

    choice: int = 0
    """Index of the choice. A seeded choice draws the same tokens, independent of the other choices."""
    resumed: Sequence[int] = ()
    """Tokens that another replica sampled. The choice continues after them, and they count as sampled."""
    until: Callable[[int], bool] | None = None
    """Function that the engine calls, in any thread, with each new token in order up to a stop token. True ends the
    choice with `stop`. It has already received the resumed tokens. It must be fast and must not raise."""
    guide: Guide | None = None
    """Constrains the choice to `Sampling.grammar`. It has already accepted the resumed tokens."""


@dataclass(frozen=True, slots=True)
class Share:
    """Key by which an engine shares its capacity fairly: tenant and session of a generation, and whether it is an
    evaluation.
    """

    salt: str = ""
    """Stands for a tenant. The cached KV of a prompt is reused only for prompts with the same salt."""
    session: str = ""
    background: bool = False
    """Whether the generation is an evaluation, which gets the capacity that users leave."""

    @property
    def tenant(self) -> tuple[bool, str]:
        """Key by which tenants are counted. Users and evaluations of a tenant count separately."""
        return self.background, self.salt


NOBODY = Share()


@dataclass(slots=True)
class Tokens:
    """Newly sampled tokens of one choice with their logprobs: one item of a generation's stream."""

    choice: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Logprobs in nats (float32) in the distribution that was sampled from: after grammar, penalties, temperature and
    truncation. Greedy choices report logprobs at temperature 1."""
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    """Most likely tokens at each position with their logprobs, best first. Empty unless `top_logprobs` is set."""
    finish: Finish | None = None
    cached_tokens: int = 0
    """Prompt tokens whose KV was in the cache."""
    sets: list[int] | None = None
    """Tokens that `top_p`, `top_k` and `min_p` left at each position
    (`headrace_schemas.events.turn.StoredSets`). None if none of these applies, if the engine does not
    report sets, or if they are too large."""

    def add(self, more: Tokens) -> None:
        """Append the tokens of `more`, which were sampled later for the same choice."""
        self.token_ids += more.token_ids
        self.logprobs += more.logprobs
        self.top += more.top
        if more.token_ids:
            self.sets = None if self.sets is None or more.sets is None else self.sets + more.sets
        self.finish = more.finish
        self.cached_tokens = max(self.cached_tokens, more.cached_tokens)


class Generation(Protocol):
    """Choices of one prompt while they are sampled. Iterate until all are finished.

    Iteration raises `EngineFailed` if the engine fails. `close` aborts unfinished choices; it may be called at any
    time.
    """

    def __aiter__(self) -> AsyncIterator[Tokens]: ...

    def close(self) -> None: ...


@runtime_checkable
class AnswerScorer(Protocol):
    """Optional interface of an engine that can compute logprobs of given answers."""

    async def score(self, version: str, answers: Sequence[TokensToScore]) -> list[list[float]]:
        """Return the logprobs of each answer's tokens after its prompt. Users' requests have priority.

        Raises:
            UnknownVersion: the version is not loaded.
            ContextLengthExceeded: a prompt with its answer is longer than the context.
        """


class Engine(Protocol):
    """An engine that serves several immutable versions side by side. All methods are called from one event loop."""

    name: str
    capacity: int
    """Sequences that can run at a time."""
    resumes: bool
    """Whether it accepts `Start`s with resumed tokens. A stock vLLM server does not."""
    grammars: bool
    """Whether it can constrain choices to `Sampling.grammar`."""
    reports_sets: bool
    """Whether it samples by the masks of `Start.guide`, or by others that equal them bit for bit, and reports
    `Tokens.sets`, so that turns can record from which tokens each one was sampled. Constrained turns of other engines
    are not trained, and truncated ones only with `Tokens.sets`."""

    async def load(self, folder: Path, manifest: Manifest) -> None:
        """Load a version while others continue to generate. The base of a LoRA version must be loaded before it.

        Raises:
            VersionUnusable: the version cannot be served.
        """

    async def unload(self, version: str) -> None:
        """Unload a version. Unfinished generations with it fail with `EngineFailed`."""

    async def probe(self, version: str) -> Probe:
        """Compare the logprobs of the loaded weights with the manifest's fingerprint and with the parent's, if
        loaded."""

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
        """Start to sample one choice for each of `starts` after `prompt`.

        With `stream`, tokens are delivered as they are sampled; otherwise each choice is delivered once it is complete,
        which costs less.

        Raises:
            UnknownVersion: the version is not loaded.
            ContextLengthExceeded: prompt and completion are longer than the context.
            Overloaded: too many sequences are running or waiting.
            PromptEmpty, TokenOutOfVocabulary: see `check_tokens`.
        """

    def in_flight(self, version: str | None = None) -> int:
        """Return the number of unfinished choices of the version; None: of all versions."""

    async def drained(self, version: str | None = None) -> None:
        """Wait until all unfinished choices of the version have ended; None: of all versions."""

    def context_tokens(self, version: str) -> int:
        """Return the largest number of tokens of prompt plus completion for the version."""

    def vocabulary(self, version: str) -> int:
        """Return the number of token ids of the version; all ids are below it."""

    @property
    def alive(self) -> bool:
        """Whether the engine works. If not, the process must be restarted."""

    def check(self) -> None:
        """Raise `EngineFailed` if the engine cannot answer until the process is restarted."""

    async def stop(self) -> None:
        """Stop the engine. Unfinished generations fail."""


def check_tokens(prompt: Sequence[int], starts: Sequence[Start], vocabulary: int) -> None:
    """Check the tokens of a request before it joins a batch with other requests.

    Raises:
        PromptEmpty: the prompt has no token.
        TokenOutOfVocabulary: the model's embedding has no row for a token.
    """
    if not prompt:
        raise PromptEmpty
    for name, ids in (("messages", prompt), *((RESUME, start.resumed) for start in starts)):
        outside = next((token for token in ids if not 0 <= token < vocabulary), None)
        if outside is not None:
            raise TokenOutOfVocabulary(outside, vocabulary, name)


@dataclass(frozen=True, slots=True)
class EngineKind:
    """Registration of an engine by a package: its class of settings, and the function that starts it."""

    make: Callable[[Any], Engine]
    """Function that starts the engine with its settings. It is called once, inside the running event loop. The caller
    must stop the engine."""
    settings: type[Section]
    """Class of the engine's settings, which are the section `[inference.<name>]`."""


ENGINES: Registry[EngineKind] = Registry("engines", EngineKind, "engine")
