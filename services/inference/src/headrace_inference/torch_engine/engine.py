"""The part of the `torch` engine that runs in the event loop, and the logprobs of a given answer."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Sequence as SequenceOf
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from headrace_inference.engine import NOBODY, Sampling, Share, Start, check_tokens
from headrace_inference.errors import ContextLengthExceeded, EngineFailed, UnknownVersion
from headrace_inference.settings import TorchSettings
from headrace_inference.streams import OpenStreams, Stream
from headrace_inference.torch_engine.batch import BatchLimits, DecodeBatch, Delivery
from headrace_inference.torch_engine.loader import Loader, Model
from headrace_inference.torch_engine.probe import probe
from headrace_inference.torch_engine.program import run
from headrace_inference.torch_engine.sampler import seed_of
from headrace_inference.torch_engine.sequence import Sequence
from headrace_inference.torch_engine.worker import Worker
from headrace_schemas import Probe
from headrace_schemas.http.replica_api import TokensToScore
from headrace_schemas.values.blobs import Manifest


@torch.inference_mode()
def score_answer(model: Model, answer: TokensToScore) -> list[float]:
    """Return the logprobs of the answer's tokens at its temperature, computed as during sampling. Blocks."""
    prompt, sampled = list(answer.prompt_token_ids), list(answer.token_ids)
    if not sampled or not prompt:
        return []
    device = model.kv_shape.device
    ids = torch.tensor([[*prompt, *sampled]], device=device)
    positions = torch.arange(ids.shape[1], device=device)
    kv = model.kv_shape.zeros(1, ids.shape[1])
    logits = run(model.module, ids, positions[None], positions, kv, keep=len(sampled) + 1)[0, :-1]
    logprobs = (logits / answer.temperature).log_softmax(-1).gather(1, ids[0, -len(sampled) :, None])[:, 0]
    return [float(logprob) for logprob in logprobs.cpu()]


_MIB = 2**20


class TorchEngine:
    """A `headrace_inference.engine.Engine`. Create it inside a running event loop; the owner must stop it."""

    name = "torch"
    resumes = True
    grammars = True
    reports_sets = True

    def __init__(self, settings: TorchSettings) -> None:
        self._settings = settings
        self.capacity = settings.sequences_max
        device, dtype = device_and_type(settings)
        threads = settings.threads or default_threads(os.cpu_count() or 1)
        torch.set_num_threads(threads)
        self._loader = Loader(device, dtype, settings.context_tokens_max, trace=settings.trace)
        self._loading = ThreadPoolExecutor(1, "loading", torch.set_num_threads, (threads,))
        self._models: dict[str, tuple[Model, Path]] = {}
        self._streams = OpenStreams(self._abort)
        self._worker = Worker(asyncio.get_running_loop(), self._deliver, threads)
        self._worker.start()

    async def stop(self) -> None:
        """Stop the worker and the loading thread. Unfinished generations fail."""
        await asyncio.to_thread(self._worker.stop)
        self._loading.shutdown(wait=True)
        self._streams.fail(EngineFailed("the engine was stopped"))

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
        await self._worker.run_in_thread(lambda: self._worker.add_batch(batch))
        self._models[model.version] = (model, folder)

    async def unload(self, version: str) -> None:
        if self._models.pop(version, None) is not None:
            await self._worker.run_in_thread(lambda: self._worker.remove_batch(version))

    async def probe(self, version: str) -> Probe:
        model = self._model(version)
        parent = self._models.get(model.manifest.parent or "")
        tolerance = self._settings.probe_tolerance
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._loading, probe, model, parent and parent[0], tolerance)

    async def score(self, version: str, answers: SequenceOf[TokensToScore]) -> list[list[float]]:
        """Return the logprobs of the tokens of each answer. Between two answers the batches compute steps."""
        model = self._model(version)
        loop = asyncio.get_running_loop()
        logprobs = []
        for answer in answers:
            self._limit(model, len(answer.prompt_token_ids), max(1, len(answer.token_ids)))
            logprobs.append(await loop.run_in_executor(self._loading, score_answer, model, answer))
        return logprobs

    def generate(
        self,
        prompt: SequenceOf[int],
        sampling: Sampling,
        version: str,
        starts: SequenceOf[Start],
        *,
        stream: bool,
        share: Share = NOBODY,
    ) -> Stream:
        model = self._model(version)
        limit = self._limit(model, len(prompt), sampling.max_tokens)
        check_tokens(prompt, starts, model.vocabulary)
        self.check()
        sequences_limit = self._settings.sequences_max + self._settings.waiting_max
        self._streams.check_capacity(len(starts), share.tenant, sequences_limit)
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        opened = self._streams.open(version, len(starts), share.tenant)
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
                guide=start.guide,
                salt=share.salt,
                session=share.session,
                background=share.background,
            )
            for start in starts
        ]
        first = sequences[0]
        first.followers = sequences[1:]
        self._worker.post(lambda: self._worker.submit(version, first))
        return opened

    def in_flight(self, version: str | None = None) -> int:
        return self._streams.in_flight(version)

    async def drained(self, version: str | None = None) -> None:
        await self._streams.drained(version)

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

    def _abort(self, stream: Stream) -> None:
        self._worker.post(lambda: self._worker.abort(stream.version, stream))

    def _model(self, version: str) -> Model:
        loaded = self._models.get(version)
        if loaded is None:
            raise UnknownVersion(version)
        return loaded[0]

    def _limit(self, model: Model, prompt_tokens: int, max_tokens: int | None) -> int:
        """Return the total number of tokens (prompt and answer) at which sampling of a sequence must stop.

        Raises:
            ContextLengthExceeded: prompt and `max_tokens` do not fit into the model's context.
        """
        context = self.context_tokens(model.version)
        if prompt_tokens + (max_tokens or 1) > context:
            raise ContextLengthExceeded(prompt_tokens, max_tokens, context)
        return prompt_tokens + max_tokens if max_tokens else context

    def _deliver(self, deliveries: list[Delivery]) -> None:
        for sequence, piece in deliveries:
            stream = sequence.owner
            assert isinstance(stream, Stream)
            stream.put(piece)


def default_threads(cores: int) -> int:
    """Return 1 on machines with up to four cores, where gateway and trainer need the others; else half of the cores."""
    return 1 if cores <= 4 else cores // 2


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, "float32" if name == "auto" else name)
    return dtype


def device_and_type(settings: TorchSettings) -> tuple[torch.device, torch.dtype | None]:
    """Return the device and the type of weights. The type is None if it depends on the version (see `Loader`)."""
    return _device(settings.device), None if settings.dtype == "auto" else _dtype(settings.dtype)
