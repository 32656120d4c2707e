"""Fixtures for the inference service, and its HTTP interface on top of a scripted engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from headrace_inference.chat.exact import ExactPrompts
from headrace_inference.chat.parsers import Parsers
from headrace_inference.chat.reasoning import THINK
from headrace_inference.chat.tokenizer import ChatTokenizer, RenderLimits
from headrace_inference.chat.tool_calls import HERMES
from headrace_inference.engine import NOBODY, Engine, Finish, Sampling, Share, Start, Tokens
from headrace_inference.errors import EngineFailed, UnknownVersion
from headrace_inference.grammar.compiler import GrammarCompiler
from headrace_inference.http.completions import Completions
from headrace_inference.http.routes import Api, ReadyVersion, RequestBounds
from headrace_inference.settings import TorchSettings
from headrace_inference.torch_engine.engine import TorchEngine
from headrace_inference.torch_engine.program import Program
from headrace_runtime.process.event_loop import WorkerThreads
from headrace_runtime.settings.sections import Common
from headrace_runtime.storage import versions
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import Probe, ServedVersion
from headrace_schemas.values.blobs import Manifest
from tests.support import tiny_model

torch.set_num_threads(1)


@dataclass(frozen=True)
class Stored:
    """A version in the blob store, and the folder that it was created from."""

    served: ServedVersion
    manifest: Manifest
    folder: Path

    @property
    def version(self) -> str:
        return self.served.version


@dataclass(frozen=True)
class Models:
    """Stored versions: `second` was trained from `first`, and `adapter` applies to `first`."""

    blobs: BlobStore
    first: Stored
    second: Stored
    adapter: Stored


def make_models(root: Path) -> Models:
    """Build the models in `root`, which takes some seconds."""
    blobs = BlobStore((root / "blobs").as_uri())

    def stored(folder: Path, **options: object) -> Stored:
        served = tiny_model.publish(blobs, folder, **options)  # type: ignore[arg-type]
        return Stored(served, versions.read_manifest(blobs, served.manifest), folder)

    first = stored(tiny_model.build(root / "first"))
    second = stored(tiny_model.perturbed(first.folder, root / "second", seed=1), step=1, parent=first.version)
    lora = tiny_model.adapter(first.folder, root / "adapter", seed=2)
    adapter = stored(lora, step=2, parent=first.version, base=(first.version, first.folder))
    return Models(blobs, first, second, adapter)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def tokenizer(models: Models) -> ChatTokenizer:
    return ChatTokenizer(models.first.folder, models.first.manifest)


@pytest.fixture(scope="module")
def grammars() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(Parsers(HERMES, THINK))
    yield compiler
    compiler.close()


MakeEngine = Callable[..., Awaitable[TorchEngine]]


@pytest.fixture(scope="session")
def traced_programs() -> dict[str, dict[str, Program | None]]:
    """Return the forward passes that engines with equal settings have traced, as each trace takes 0.1 s."""
    return {}


@pytest.fixture
async def make_engine(
    models: Models, traced_programs: dict[str, dict[str, Program | None]]
) -> AsyncIterator[MakeEngine]:
    """Return a function that starts an engine with the given settings and loads `first`. Engines stop after the
    test."""
    engines: list[TorchEngine] = []

    async def make(**settings: object) -> TorchEngine:
        engine = TorchEngine(TorchSettings.model_validate({"device": "cpu", **settings}))
        engine._loader._programs._programs = traced_programs.setdefault(str(settings), {})
        engines.append(engine)
        await engine.load(models.first.folder, models.first.manifest)
        return engine

    yield make
    for engine in engines:
        await engine.stop()


@pytest.fixture
async def engine(make_engine: MakeEngine) -> TorchEngine:
    return await make_engine()


async def sample(
    engine: TorchEngine,
    prompt: list[int],
    version: str,
    *,
    stream: bool = False,
    start: Start | None = None,
    **how: Any,
) -> Tokens:
    """Return all tokens of one choice."""
    collected = Tokens(0)
    options = {"max_tokens": 24, **how}
    sampling = Sampling(**options)
    async for tokens in engine.generate(prompt, sampling, version, [start or Start()], stream=stream):
        collected.token_ids += tokens.token_ids
        collected.logprobs += tokens.logprobs
        collected.top += tokens.top
        collected.finish = tokens.finish
        collected.cached_tokens = tokens.cached_tokens
    return collected


def prompt_of(length: int, salt: int = 0) -> list[int]:
    """Return `length` ids of ordinary tokens. Prompts with different `salt` have different first tokens."""
    return [10 + (31 * position + 97 * salt + position * position * (salt + 1)) % 290 for position in range(length)]


VERSION = "tiny@0123456789abcdef"
CONTEXT = 512
DEFAULT_PARSERS = Parsers(HERMES, THINK)


@dataclass(frozen=True)
class ScriptedCall:
    """Arguments of one call of `generate`."""

    prompt: list[int]
    sampling: Sampling
    version: str
    starts: list[Start]
    salt: str = ""
    share: Share = NOBODY


class ScriptedEngine:
    """Engine in which choice `i` generates `scripts[i % len(scripts)]` (a text, or token ids) and the end-of-turn
    token.

    Each token has the logprob -0.5; a few tokens arrive at a time. The engine obeys `until`, `max_tokens` and resumed
    tokens. `hold` delays the end; `fail_after` is the number of tokens after which it fails.
    """

    name = "scripted"
    resumes = True
    grammars = True
    reports_sets = False
    capacity = 4
    alive = True

    def __init__(self, tokenizer: ChatTokenizer, *scripts: str | Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.scripts = scripts
        self.asked: list[ScriptedCall] = []
        self.begun = asyncio.Event()
        self.closed = 0
        self.portion = 2
        self.hold: asyncio.Event | None = None
        self.fail_after: int | None = None
        self.refusal: Exception | None = None

    async def load(self, folder: Path, manifest: Manifest) -> None:
        raise NotImplementedError

    async def unload(self, version: str) -> None:
        raise NotImplementedError

    async def probe(self, version: str) -> Probe:
        raise NotImplementedError

    async def drained(self, version: str | None = None) -> None:
        raise NotImplementedError

    def in_flight(self, version: str | None = None) -> int:
        return len(self.asked) - self.closed

    def context_tokens(self, version: str) -> int:
        return CONTEXT

    def vocabulary(self, version: str) -> int:
        return 320

    def check(self) -> None:
        pass

    async def stop(self) -> None:
        raise NotImplementedError

    def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        version: str,
        starts: Sequence[Start],
        *,
        stream: bool,
        share: Share = NOBODY,
    ) -> ScriptedGeneration:
        if self.refusal is not None:
            raise self.refusal
        self.begun.set()
        self.asked.append(ScriptedCall([*prompt], sampling, version, [*starts], share.salt, share))
        return ScriptedGeneration(self, sampling, starts, stream=stream)

    def tokens_of(self, choice: int) -> list[int]:
        script = self.scripts[choice % len(self.scripts)]
        end = [self._tokenizer.eos_id] if self._tokenizer.eos_id is not None else []
        return [*self._tokenizer.encode(script), *end] if isinstance(script, str) else [*script]


class ScriptedGeneration:
    def __init__(self, engine: ScriptedEngine, sampling: Sampling, starts: Sequence[Start], *, stream: bool) -> None:
        self._engine = engine
        self._sampling = sampling
        self._starts = starts
        self._stream = stream
        self._closed = False

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._engine.closed += 1

    def __aiter__(self) -> AsyncIterator[Tokens]:
        return self._pieces()

    async def _pieces(self) -> AsyncIterator[Tokens]:
        for start in self._starts:
            tokens, finish = self._sampled(start)
            step = self._engine.portion if self._stream else max(len(tokens), 1)
            for at in range(0, len(tokens), step):
                if self._engine.fail_after is not None and at >= self._engine.fail_after:
                    raise EngineFailed("the script says so")
                piece = tokens[at : at + step]
                last = at + step >= len(tokens)
                if last and self._engine.hold is not None:
                    await self._engine.hold.wait()
                top = [[(token, -0.5), (0, -2.0)][: self._sampling.top_logprobs] for token in piece]
                yield Tokens(start.choice, piece, [-0.5] * len(piece), top, finish if last else None, 3)
                await asyncio.sleep(0)

    def _sampled(self, start: Start) -> tuple[list[int], Finish]:
        script = self._engine.tokens_of(start.choice)
        assert script[: len(start.resumed)] == [*start.resumed], "resumed tokens are those of the script"
        tokens: list[int] = []
        for token in script[len(start.resumed) :]:
            tokens.append(token)
            if token in self._sampling.stop_ids or (start.until is not None and start.until(token)):
                return tokens, "stop"
            if self._sampling.max_tokens == len(start.resumed) + len(tokens):
                break
        return tokens, "length"


class OneVersion:
    """Implementation of `Versions` with a single version."""

    def __init__(self, tokenizer: ChatTokenizer, version: str = VERSION) -> None:
        self._served = ReadyVersion(version, tokenizer, CONTEXT, 1_700_000_000, None)

    def serving_versions(self) -> Sequence[ReadyVersion]:
        return [self._served]

    def find_version(self, model: str) -> ReadyVersion:
        if model not in (self._served.version, "tiny"):
            raise UnknownVersion(model)
        return self._served


def client(
    engine: Engine,
    tokenizer: ChatTokenizer,
    body_bytes_max: int = 20_000,
    version: str = VERSION,
    parsers: Parsers = DEFAULT_PARSERS,
    **security: str,
) -> httpx.AsyncClient:
    """Return a client of the HTTP interface that uses no socket."""
    worker_threads = WorkerThreads(1)
    limits = RenderLimits(bytes_max=2_000_000, timeout_s=60.0)
    grammars = GrammarCompiler(parsers)
    completions = Completions(engine, ExactPrompts(100_000, parsers), parsers, worker_threads, grammars, limits)
    common = Common.model_validate({"security": security})
    api = Api(
        common,
        OneVersion(tokenizer, version),
        completions,
        RequestBounds(body_bytes_max, choices_max=4, json_values_max=10_000),
        worker_threads,
    )
    transport = httpx.ASGITransport(api.app({"engine": lambda: engine.alive}), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://replica")


USER = [{"role": "user", "content": "What is new?"}]
TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "search", "arguments": {"query":  "mail"}}</tool_call>'
FULL = {"return_token_ids": True, "logprobs": True}
Json = dict[str, Any]


async def ask(http: httpx.AsyncClient, **fields: object) -> httpx.Response:
    return await http.post("/v1/chat/completions", json={"model": VERSION, "messages": USER, **fields})


async def ask_stream(http: httpx.AsyncClient, **fields: object) -> list[Json]:
    """Return the chunks of a stream, which must have ended without an error."""
    response = await ask(http, stream=True, **fields)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def joined(chunks: Sequence[Json], choice: int = 0) -> Json:
    """Return one choice of a stream, assembled from its deltas as a client does."""
    message: Json = {
        "content": "",
        "reasoning_content": "",
        "tool_calls": [],
        "token_ids": [],
        "logprobs": [],
        "ends": [],
    }
    for chunk in chunks:
        for part in chunk["choices"]:
            if part["index"] != choice:
                continue
            delta = part["delta"]
            for name in ("content", "reasoning_content"):
                message[name] += delta.get(name) or ""
            message["tool_calls"] += delta.get("tool_calls", [])
            message["token_ids"] += part.get("token_ids", [])
            message["logprobs"] += (part["logprobs"] or {"content": []})["content"]
            message["ends"] += [part["finish_reason"]] if part["finish_reason"] else []
    return message
