"""An agent on the real inference engine in one process, with the turns that the gateway would capture.

Prompts, sampling and answers are those of `headrace_inference`. HTTP, the bus and the databases are left out.
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
from headrace_inference.chat.exact import ExactPrompts
from headrace_inference.chat.parsers import Parsers
from headrace_inference.chat.tokenizer import ChatTokenizer
from headrace_inference.chat.tool_calls import HERMES
from headrace_inference.grammar.compiler import GrammarCompiler
from headrace_inference.http.completions import Completions
from headrace_inference.http.wire import ChatRequest
from headrace_inference.settings import TorchSettings
from headrace_inference.torch_engine.engine import TorchEngine
from headrace_runtime.process.event_loop import WorkerThreads
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.storage.versions import VersionCache
from headrace_schemas import Choice, Message, Sampling, Turn, Usage
from headrace_schemas.http.answer_form import grammar_of
from headrace_schemas.values.base import utcnow
from headrace_schemas.values.blobs import BlobRef
from headrace_schemas.values.ids import response_id, session_key
from headrace_statistics.intervals import Score

PLAYERS = 64
"""Number of concurrent episodes: those of one step, so that the engine decodes them in one batch."""
MAX_TOKENS = 64
PLAYS_SEED = 1_000_000
"""First seed of measured plays, which differ from the seeds of the gate."""


class Question(Protocol):
    """Task of an agent. Runs are compared within a `kind` of task."""

    @property
    def id(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def question(self) -> str: ...


T = TypeVar("T", bound=Question)


@dataclass(frozen=True)
class PlayedRun(Generic[T]):
    """A finished run of one task. Its client can send further requests in the same session."""

    task: T
    client: CapturingClient
    episode: Episode

    @property
    def turns(self) -> list[Turn]:
        return self.client.turns


class EngineWorld(ABC, Generic[T]):
    """Tasks of one seed, with an engine that loads versions. `open` creates it."""

    agent: Agent
    model: str

    def __init__(self, seed: int, blobs: BlobStore, folder: Path, engine: TorchEngine) -> None:
        self.seed = seed
        self.training_tasks = self.questions("train")
        """Tasks of the agent's training traffic."""
        self._audit = self.questions("audit")
        self._audited: list[T] = []
        self._cache = VersionCache(blobs, folder)
        self._engine = engine
        parsers = Parsers(HERMES)
        self._completions = Completions(
            engine,
            ExactPrompts(1_000_000, parsers),
            parsers,
            WorkerThreads(1, 1 << 30),
            GrammarCompiler(parsers),
        )
        self._tokenizers: dict[str, ChatTokenizer] = {}

    @abstractmethod
    def questions(self, split: str) -> Iterator[T]:
        """Yield tasks of a split without end. The splits `train` and `audit` share no task."""

    @abstractmethod
    def tools_of(self, task: T) -> Tools:
        """Return the tools for a run of the task."""

    @abstractmethod
    def is_right(self, task: T, episode: Episode) -> bool:
        """Return whether the run solved the task."""

    @classmethod
    @asynccontextmanager
    async def open(cls, seed: int, blobs: BlobStore, folder: Path) -> AsyncIterator[Self]:
        engine = TorchEngine(TorchSettings(device="cpu", threads=1))
        try:
            yield cls(seed, blobs, folder, engine)
        finally:
            await engine.stop()

    async def load(self, ref: BlobRef) -> str:
        """Load a version of the trainer and return its name."""
        manifest, folder = await self._cache.fetch(ref)
        if manifest.version not in self._tokenizers:
            await self._engine.load(folder, manifest)
            self._tokenizers[manifest.version] = ChatTokenizer(folder, manifest)
        return manifest.version

    async def folder(self, ref: BlobRef) -> Path:
        """Return the folder with the files of a version."""
        return (await self._cache.fetch(ref))[1]

    async def unload(self, version: str) -> None:
        await self._engine.unload(version)
        del self._tokenizers[version]

    async def play_all(
        self, version: str, tasks: Sequence[T], seeds: Sequence[int] | None = None
    ) -> list[PlayedRun[T]]:
        """Play one run of each task and return the runs in order. Without `seeds`, sampling is different each time."""
        slots = asyncio.Semaphore(PLAYERS)

        async def play(number: int, task: T) -> PlayedRun[T]:
            async with slots:
                return await self.play_once(version, task, None if seeds is None else seeds[number])

        return list(await asyncio.gather(*(play(*pair) for pair in enumerate(tasks))))

    async def play_once(self, version: str, task: T, seed: int | None) -> PlayedRun[T]:
        client = CapturingClient(self._completions, self._tokenizers[version], version, self.model)
        openai_client = cast(AsyncOpenAI, client)
        tools = self.tools_of(task)
        return PlayedRun(
            task, client, await self.agent.play(openai_client, version, tools, task.question, MAX_TOKENS, seed)
        )

    async def score(self, version: str, plays: int) -> list[Score]:
        """Return the scores of plays of audit tasks, which are the same for every version."""
        while len(self._audited) < plays:
            self._audited.append(next(self._audit))
        tasks = self._audited[:plays]
        runs = await self.play_all(version, tasks, range(PLAYS_SEED, PLAYS_SEED + plays))
        return [(run.task.id, float(self.is_right(run.task, run.episode))) for run in runs]


class CapturingClient:
    """Client with the part of `AsyncOpenAI` that agents use. It stores the turns that the gateway would capture."""

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
            response = json.loads(await completion.complete())
        finally:
            completion.close()
        key = session_key("default", self._session)
        (choice,) = response["choices"]
        turn = Turn(
            time=utcnow(),
            turn_id=response_id(key),
            session_key=key,
            session_id=self._session,
            session_source="header",
            model=self._model,
            version=response["model"],
            replica_id="in-process",
            request_digest="0" * 64,
            messages=request.messages,
            tools=request.offered_tools,
            sampling=Sampling(
                temperature=body["temperature"],
                max_tokens=body["max_tokens"],
                grammar=grammar_of(request.response_format, request.tool_choice),
            ),
            token_grammar=response.get("headrace_grammar"),
            prompt_token_ids=response["prompt_token_ids"],
            choices=(
                Choice(
                    index=0,
                    token_ids=choice["token_ids"],
                    logprobs=[token["logprob"] for token in choice["logprobs"]["content"]],
                    finish_reason=choice["finish_reason"],
                    message=Message.model_validate(choice["message"]),
                ),
            ),
            usage=Usage(
                prompt_tokens=response["usage"]["prompt_tokens"],
                completion_tokens=response["usage"]["completion_tokens"],
            ),
            started_at=began,
        )
        self.turns.append(turn)
        choice["logprobs"] = None
        return ChatCompletion.model_validate({**response, "id": turn.turn_id})
