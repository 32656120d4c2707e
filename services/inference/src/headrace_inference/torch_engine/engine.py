"""The part of the `torch` engine that runs in the event loop."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator
from collections.abc import Sequence as SequenceOf
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from headrace_inference.engine import Sampling, Start, Tokens
from headrace_inference.errors import ContextLengthExceeded, EngineFailed, Overloaded, UnknownVersion
from headrace_inference.settings import TorchSettings
from headrace_inference.torch_engine.batch import BatchLimits, DecodeBatch
from headrace_inference.torch_engine.loader import Loader
from headrace_inference.torch_engine.model import Model
from headrace_inference.torch_engine.probe import probe
from headrace_inference.torch_engine.sampler import seed_of
from headrace_inference.torch_engine.scoring import score
from headrace_inference.torch_engine.sequence import Sequence
from headrace_inference.torch_engine.worker import News, Worker
from headrace_schemas import Probe
from headrace_schemas.manifest import Manifest
from headrace_schemas.scoring import TokensToScore

_MIB = 2**20


class TorchEngine:
    """See `headrace_inference.engine.Engine`. Made inside a running event loop; `stop` it at the end."""

    name = "torch"
    resumes = True

    def __init__(self, settings: TorchSettings) -> None:
        self._settings = settings
        self.capacity = settings.sequences_max
        device, dtype = device_and_type(settings)
        threads = settings.threads or default_threads(os.cpu_count() or 1)
        torch.set_num_threads(threads)
        self._loader = Loader(device, dtype, settings.context_tokens_max, trace=settings.trace)
        self._loading = ThreadPoolExecutor(1, "loading", torch.set_num_threads, (threads,))
        self._models: dict[str, tuple[Model, Path]] = {}
        self._open: set[Stream] = set()
        self._ended = asyncio.Event()
        self._worker = Worker(asyncio.get_running_loop(), self._deliver, threads)
        self._worker.start()

    async def stop(self) -> None:
        """Nothing generates afterwards."""
        await asyncio.to_thread(self._worker.stop)
        self._loading.shutdown(wait=True)
        self._fail(list(self._open), EngineFailed("the engine was stopped"))

    async def load(self, folder: Path, manifest: Manifest) -> None:
        base = self._models.get(manifest.base or "")
        loop = asyncio.get_running_loop()
        model = await loop.run_in_executor(
            self._loading, self._loader.load, folder, manifest, base and base[0], base and base[1]
        )
        limits = BatchLimits(
            sequences_max=self._settings.sequences_max,
            prefill_tokens_max=self._settings.prefill_tokens_max,
            kv_bytes_max=self._settings.kv_mib_max * _MIB,
            prefix_bytes_max=self._settings.prefix_mib_max * _MIB,
        )
        batch = await loop.run_in_executor(self._loading, DecodeBatch, model, limits)
        await self._worker.do(lambda: self._worker.add_batch(batch))
        self._models[model.version] = (model, folder)

    async def unload(self, version: str) -> None:
        if self._models.pop(version, None) is not None:
            await self._worker.do(lambda: self._worker.remove_batch(version))

    async def probe(self, version: str) -> Probe:
        model = self._model(version)
        parent = self._models.get(model.manifest.parent or "")
        tolerance = self._settings.probe_tolerance
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._loading, probe, model, parent and parent[0], tolerance)

    async def score(self, version: str, answers: SequenceOf[TokensToScore]) -> list[list[float]]:
        """One answer at a time, in the thread that loads: steps of users' batches go on between them."""
        model = self._model(version)
        loop = asyncio.get_running_loop()
        found = []
        for one in answers:
            self._limit(model, len(one.prompt_token_ids), max(1, len(one.token_ids)))
            found.append(await loop.run_in_executor(self._loading, score, model, one))
        return found

    def generate(
        self,
        prompt: SequenceOf[int],
        sampling: Sampling,
        version: str,
        starts: SequenceOf[Start],
        *,
        stream: bool,
        salt: str = "",
    ) -> Stream:
        limit = self._limit(self._model(version), len(prompt), sampling.max_tokens)
        self.check()
        room = self._settings.sequences_max + self._settings.waiting_max
        if self.in_flight() + len(starts) > room:
            raise Overloaded(f"{self.in_flight()} sequences are running or waiting, {room} are allowed; try again")
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        opened = Stream(self, version, len(starts))
        sequences = [
            Sequence(
                owner=opened,
                choice=start.choice,
                tokens=[*prompt, *start.resumed],
                prompt_length=len(prompt),
                limit=limit,
                sampling=sampling,
                seed=seed_of(seed, start.choice),
                stream=stream,
                resumed=len(start.resumed),
                until=start.until,
                salt=salt,
            )
            for start in starts
        ]
        first = sequences[0]
        first.followers = sequences[1:]
        self._open.add(opened)
        self._worker.post(lambda: self._worker.submit(version, first))
        return opened

    def in_flight(self, version: str | None = None) -> int:
        return sum(stream.unfinished for stream in self._open if version in (None, stream.version))

    async def drained(self, version: str | None = None) -> None:
        while self.in_flight(version):
            self._ended.clear()
            await self._ended.wait()

    def context_tokens(self, version: str) -> int:
        model = self._model(version)
        return min(model.context_tokens, self._settings.kv_mib_max * _MIB // model.kv_shape.token_bytes)

    def vocabulary(self, version: str) -> int:
        return self._model(version).vocabulary

    @property
    def alive(self) -> bool:
        return self._worker.alive

    def check(self) -> None:
        if not self.alive:
            raise EngineFailed("the engine's thread has ended; the process must be restarted")

    def closed(self, stream: Stream) -> None:
        """A stream has ended or was left."""
        self._open.discard(stream)
        self._ended.set()
        if stream.unfinished:
            self._worker.post(lambda: self._worker.abort(stream.version, stream))

    def _model(self, version: str) -> Model:
        found = self._models.get(version)
        if found is None:
            raise UnknownVersion(version)
        return found[0]

    def _limit(self, model: Model, prompt_tokens: int, max_tokens: int | None) -> int:
        """Length at which a sequence ends. Raises `ContextLengthExceeded`."""
        context = self.context_tokens(model.version)
        if prompt_tokens + (max_tokens or 1) > context:
            raise ContextLengthExceeded(prompt_tokens, max_tokens, context)
        return prompt_tokens + max_tokens if max_tokens else context

    def _deliver(self, news: News) -> None:
        for sequence, piece in news:
            stream = sequence.owner
            assert isinstance(stream, Stream)
            stream.put(piece)

    @staticmethod
    def _fail(streams: SequenceOf[Stream], error: EngineFailed) -> None:
        for stream in streams:
            stream.put(error)


class Stream:
    """A `Generation`: what the worker delivers, merged until it is asked for. Lives in the event loop."""

    def __init__(self, engine: TorchEngine, version: str, choices: int) -> None:
        self.version = version
        self.unfinished = choices
        self._engine = engine
        self._pending: dict[int, Tokens] = {}
        self._error: EngineFailed | None = None
        self._arrived = asyncio.Event()

    def put(self, piece: Tokens | EngineFailed) -> None:
        """Called by the engine; what comes after the end is dropped."""
        if not self.unfinished:
            return
        if isinstance(piece, EngineFailed):
            self._error = piece
            self._engine.closed(self)  # with what its other choices still had to do
            self.unfinished = 0
        else:
            held = self._pending.get(piece.choice)
            if held is None:
                self._pending[piece.choice] = piece
            else:
                held.token_ids += piece.token_ids
                held.logprobs += piece.logprobs
                held.top += piece.top
                held.finish = piece.finish
            self.unfinished -= piece.finish is not None
        if not self.unfinished:
            self._engine.closed(self)
        self._arrived.set()

    def __aiter__(self) -> AsyncIterator[Tokens]:
        return self

    async def __anext__(self) -> Tokens:
        while not self._pending:
            if self._error is not None:
                raise self._error
            if not self.unfinished:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        return self._pending.pop(next(iter(self._pending)))

    def close(self) -> None:
        self._engine.closed(self)
        self.unfinished = 0
        self._arrived.set()


def default_threads(cores: int) -> int:
    """One on small machines, where the gateway and the trainer want the other cores; else half of them."""
    return 1 if cores <= 4 else cores // 2


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, "float32" if name == "auto" else name)
    return dtype


def device_and_type(settings: TorchSettings) -> tuple[torch.device, torch.dtype | None]:
    """Where weights are loaded and as what; None: as their files have them."""
    device = _device(settings.device)
    return device, None if settings.dtype == "auto" and device.type != "cpu" else _dtype(settings.dtype)
