"""Fixtures for the inference service: a tiny model, a version trained from it, an adapter and a tokenizer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace_inference.chat.parsers import Parsers
from headrace_inference.chat.reasoning import THINK
from headrace_inference.chat.tokenizer import ChatTokenizer
from headrace_inference.chat.tool_calls import HERMES
from headrace_inference.engine import Sampling, Start, Tokens
from headrace_inference.grammar.compiler import GrammarCompiler
from headrace_inference.settings import TorchSettings
from headrace_inference.torch_engine.engine import TorchEngine
from headrace_runtime.storage import versions
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import ServedVersion
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


@pytest.fixture
async def make_engine(models: Models) -> AsyncIterator[MakeEngine]:
    """Return a function that starts an engine with the given settings and loads `first`. Engines stop after the
    test."""
    engines: list[TorchEngine] = []

    async def make(**settings: object) -> TorchEngine:
        engine = TorchEngine(TorchSettings.model_validate({"device": "cpu", **settings}))
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
