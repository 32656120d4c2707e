"""An agent that plays in one process on the real engine, and what the gateway would have captured of it.

What is real: prompts, sampling and answers (`headrace_inference`). What is left out: HTTP, the bus and the databases.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Generic, Protocol, Self, TypeVar, cast

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion

from example_parts.react import Agent, Episode, Tools
from headrace_cli.controls.statistics import Score
from headrace_inference.chat.exact import ExactPrompts
from headrace_inference.chat.parsers import Parsers
from headrace_inference.chat.tokenizer import ChatTokenizer
from headrace_inference.chat.tool_calls import HERMES
from headrace_inference.grammar.compiler import GrammarCompiler
from headrace_inference.grammar.settings import GrammarSettings
from headrace_inference.http.completions import Completions
from headrace_inference.http.request import ChatRequest
from headrace_inference.settings import TorchSettings
from headrace_inference.torch_engine.engine import TorchEngine
from headrace_runtime.aside import Aside
from headrace_runtime.blobs import BlobStore
from headrace_runtime.versions import VersionCache
from headrace_schemas import Choice, Message, Sampling, Turn, Usage
from headrace_schemas.base import utcnow
from headrace_schemas.blobs import BlobRef
from headrace_schemas.ids import response_id, session_key

PLAYERS = 64
"""Episodes at a time: those of a step, so that the engine decodes them together."""
MAX_TOKENS = 64
PLAYS_SEED = 1_000_000
"""Where the seeds of measured plays begin: others than those of the gate."""


class Question(Protocol):
    """What an agent is asked. `kind` is what its runs are compared within."""

    @property
    def id(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def question(self) -> str: ...


T = TypeVar("T", bound=Question)


@dataclass(frozen=True)
class PlayedRun(Generic[T]):
    """One question, played to its end. More may be asked of its client."""

    task: T
    client: CapturingClient
    episode: Episode

    @property
    def turns(self) -> list[Turn]:
        return self.client.turns


class EngineWorld(ABC, Generic[T]):
    """What one seed's agent is asked, and an engine that loads versions. `open` makes one."""

    agent: Agent
    model: str

    def __init__(self, seed: int, blobs: BlobStore, folder: Path, engine: TorchEngine) -> None:
        self.seed = seed
        self.asked = self.questions("train")
        """The agent's own traffic."""
        self._audit = self.questions("audit")
        self._audited: list[T] = []
        self._cache = VersionCache(blobs, folder)
        self._engine = engine
        parsers = Parsers(HERMES)
        self._completions = Completions(
            engine,
            ExactPrompts(1_000_000, parsers),
            parsers,
            Aside(1, 1 << 30),
            GrammarCompiler(parsers, GrammarSettings()),
        )
        self._tokenizers: dict[str, ChatTokenizer] = {}

    @abstractmethod
    def questions(self, split: str) -> Iterator[T]:
        """Without end: those of `train` are of the agent's own traffic, which never asks those of `audit`."""

    @abstractmethod
    def tools_of(self, task: T) -> Tools:
        """What the agent may call in a run of it."""

    @abstractmethod
    def right(self, task: T, episode: Episode) -> bool:
        """Whether it came to the right end."""

    @classmethod
    @asynccontextmanager
    async def open(cls, seed: int, blobs: BlobStore, folder: Path) -> AsyncIterator[Self]:
        engine = TorchEngine(TorchSettings(device="cpu", threads=1))
        try:
            yield cls(seed, blobs, folder, engine)
        finally:
            await engine.stop()

    async def load(self, ref: BlobRef) -> str:
        """A version of the trainer, ready to play."""
        manifest, folder = await self._cache.fetch(ref)
        if manifest.version not in self._tokenizers:
            await self._engine.load(folder, manifest)
            self._tokenizers[manifest.version] = ChatTokenizer(folder, manifest)
        return manifest.version

    async def folder(self, ref: BlobRef) -> Path:
        """Where the files of a version lie."""
        return (await self._cache.fetch(ref))[1]

    async def unload(self, version: str) -> None:
        await self._engine.unload(version)
        del self._tokenizers[version]

    async def played(self, version: str, tasks: Sequence[T], seeds: Sequence[int] | None = None) -> list[PlayedRun[T]]:
        """A run of each, in their order. Without `seeds` what is sampled is new each time."""
        room = asyncio.Semaphore(PLAYERS)

        async def one(number: int, task: T) -> PlayedRun[T]:
            async with room:
                return await self.play_once(version, task, None if seeds is None else seeds[number])

        return list(await asyncio.gather(*(one(*pair) for pair in enumerate(tasks))))

    async def play_once(self, version: str, task: T, seed: int | None) -> PlayedRun[T]:
        client = CapturingClient(self._completions, self._tokenizers[version], version, self.model)
        asks = cast(AsyncOpenAI, client)
        tools = self.tools_of(task)
        return PlayedRun(task, client, await self.agent.play(asks, version, tools, task.question, MAX_TOKENS, seed))

    async def score(self, version: str, plays: int) -> list[Score]:
        """Plays of audit tasks, the same for every version."""
        while len(self._audited) < plays:
            self._audited.append(next(self._audit))
        tasks = self._audited[:plays]
        runs = await self.played(version, tasks, range(PLAYS_SEED, PLAYS_SEED + plays))
        return [(one.task.id, float(self.right(one.task, one.episode))) for one in runs]


class CapturingClient:
    """As much of `AsyncOpenAI` as an agent uses; keeps what the gateway would capture."""

    def __init__(self, completions: Completions, tokenizer: ChatTokenizer, version: str, model: str) -> None:
        self._completions, self._tokenizer, self.version, self._model = completions, tokenizer, version, model
        self._session = uuid.uuid4().hex
        self.turns: list[Turn] = []
        self.chat = SimpleNamespace(completions=self)

    async def create(self, *, seed: object, **body: Any) -> ChatCompletion:
        body |= {"return_token_ids": True, "logprobs": True}
        if isinstance(seed, int):
            body["seed"] = seed
        request = ChatRequest.model_validate_json(json.dumps(body))
        began = utcnow()
        completion = await self._completions.begin(request, self.version, self._tokenizer)
        try:
            answered = json.loads(await completion.whole())
        finally:
            completion.close()
        key = session_key("default", self._session)
        (choice,) = answered["choices"]
        turn = Turn(
            time=utcnow(),
            turn_id=response_id(key),
            session_key=key,
            session_id=self._session,
            session_source="header",
            model=self._model,
            version=answered["model"],
            replica_id="in-process",
            request_digest="0" * 64,
            messages=request.messages,
            tools=request.offered_tools,
            sampling=Sampling(temperature=body["temperature"], max_tokens=body["max_tokens"]),
            prompt_token_ids=answered["prompt_token_ids"],
            choices=(
                Choice(
                    index=0,
                    token_ids=choice["token_ids"],
                    logprobs=[one["logprob"] for one in choice["logprobs"]["content"]],
                    finish_reason=choice["finish_reason"],
                    message=Message.model_validate(choice["message"]),
                ),
            ),
            usage=Usage(
                prompt_tokens=answered["usage"]["prompt_tokens"],
                completion_tokens=answered["usage"]["completion_tokens"],
            ),
            started_at=began,
        )
        self.turns.append(turn)
        choice["logprobs"] = None
        return ChatCompletion.model_validate({**answered, "id": turn.turn_id})
