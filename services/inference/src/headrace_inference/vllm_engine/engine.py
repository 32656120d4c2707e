"""The part of the `vllm` engine that runs in the event loop: versions of each engine core, and requests."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import uuid
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from headrace_inference import metrics
from headrace_inference.engine import NOBODY, Sampling, Share, Start, Tokens, check_tokens
from headrace_inference.errors import (
    ContextLengthExceeded,
    EngineFailed,
    NoRoom,
    UnknownVersion,
    VersionUnusable,
)
from headrace_inference.streams import OpenStreams, Stream
from headrace_inference.vllm_engine import probing
from headrace_inference.vllm_engine.core import Core, Library, Request, RequestPiece, StartedCore
from headrace_inference.vllm_engine.requests import cut_at_stop, ranked_of, refuse_unsupported, request_of, tokens_of
from headrace_inference.vllm_engine.settings import VllmSettings
from headrace_runtime.process.logs import get_logger
from headrace_schemas import Probe
from headrace_schemas.events.turn import STORED_SETS_MAX
from headrace_schemas.values.blobs import Manifest

log = get_logger(__name__)
_PROBE_TOLERANCE = 1e-3
"""Difference in nats between float32 kernels of vLLM and of torch; narrower types need `inference.probe_tolerance`."""
_REASON_LENGTH_MAX = 500
_BACKGROUND_PRIORITY = 1_000_000
"""Added to the priority of evaluations, so that they come after all users; vLLM serves lower numbers first. The
priority of a user's choice is the number of unfinished choices of the tenant, so tenants with few choices go first."""


@dataclass(frozen=True, eq=False)
class _LoadedVersion:
    """A version that an engine core of vLLM has loaded. `adapter` is its LoRA request, or None for the full version."""

    manifest: Manifest
    core: Core
    adapter: object | None = None
    number: int = 0

    @property
    def version(self) -> str:
        return self.manifest.version


class VllmEngine:
    """A `headrace_inference.engine.Engine`. Create it inside a running event loop; the owner must stop it.

    A core runs as long as it has a version, also if routing drops the full version before its adapters.
    """

    name = "vllm"
    resumes = True
    grammars = True
    reports_sets = True

    def __init__(self, settings: VllmSettings, library: Library) -> None:
        self._settings = settings
        self._library = library
        self.capacity = settings.sequences_max
        self._cores: dict[str, Core] = {}
        self._loaded: dict[str, _LoadedVersion] = {}
        self._numbers = itertools.count(1)
        self._streams = OpenStreams(self._abort)
        self._tasks: dict[Stream, set[asyncio.Task[None]]] = {}
        self._starting = ThreadPoolExecutor(1, "vllm-start")
        self._starts: set[Future[StartedCore]] = set()
        self._stopped = False

    # Versions

    async def load(self, folder: Path, manifest: Manifest) -> None:
        self.check()
        if manifest.kind == "full":
            core = self._cores.get(manifest.version) or await self._start(folder, manifest.version)
            loaded = _LoadedVersion(manifest, core)
        else:
            loaded = await self._adapter(folder, manifest)
        loaded.core.versions.add(manifest.version)
        self._loaded[manifest.version] = loaded

    async def unload(self, version: str) -> None:
        loaded = self._loaded.pop(version, None)
        if loaded is None:
            return
        self._streams.fail(EngineFailed(f"{version} was unloaded"), version)
        with contextlib.suppress(KeyError):
            metrics.RUNNING.remove(version)
        core = loaded.core
        core.versions.discard(version)
        if not core.versions:
            del self._cores[core.base]
            await core.stop()
        elif loaded.adapter is not None and not core.llm.errored:
            await core.llm.remove_lora(loaded.number)

    async def probe(self, version: str) -> Probe:
        loaded = self._find(version)
        parent = self._loaded.get(loaded.manifest.parent or "")
        comparable = parent is not None and parent.core.started.vocabulary == loaded.core.started.vocabulary
        cores = {loaded.core, parent.core} if parent is not None else {loaded.core}
        async with contextlib.AsyncExitStack() as stack:
            for core in sorted(cores, key=lambda core: core.base):
                await stack.enter_async_context(core.separation.enter_probe())
            await stack.enter_async_context(asyncio.timeout(self._settings.start_timeout_s))
            return await probing.probe(
                loaded.manifest.fingerprint,
                self._logprob_function(loaded),
                self._logprob_function(parent) if parent is not None and comparable else None,
                self._settings.sequences_max,
                self._settings.probe_tolerance or _PROBE_TOLERANCE,
            )

    async def _start(self, folder: Path, version: str) -> Core:
        if len(self._cores) >= self._settings.cores_max:
            limit = f"inference.vllm.cores_max allows {self._settings.cores_max} full versions at a time"
            raise NoRoom(f"{version}: {limit}, and {' and '.join(sorted(self._cores))} are loaded")
        future = self._starting.submit(self._library.start, folder)
        self._starts.add(future)
        future.add_done_callback(self._starts.discard)
        try:
            started = await asyncio.shield(asyncio.wrap_future(future))
        except asyncio.CancelledError:
            future.add_done_callback(_shut_down)
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error)[:_REASON_LENGTH_MAX]}"
            raise VersionUnusable(
                f"{version}: vLLM cannot start with this version: {reason}; see the log of this replica"
            ) from error
        core = self._cores[version] = Core(version, started)
        return core

    async def _adapter(self, folder: Path, manifest: Manifest) -> _LoadedVersion:
        version, core = manifest.version, self._cores.get(manifest.base or "")
        if core is None:
            raise VersionUnusable(f"{version}: its base {manifest.base} is not loaded; routing must serve it too")
        if core.adapters >= self._settings.adapters_max:
            limit = f"inference.vllm.adapters_max allows {self._settings.adapters_max} adapters of one version"
            raise NoRoom(f"{version}: {limit}, and {core.adapters} are loaded")
        try:
            probing.check_adapter(folder, self._settings.adapter_rank_max)
        except VersionUnusable as error:
            raise VersionUnusable(f"{version}: {error}") from error
        number = next(self._numbers)
        adapter = self._library.adapter(version, number, folder)
        try:
            async with asyncio.timeout(self._settings.start_timeout_s):
                await core.llm.add_lora(adapter)
                await core.llm.pin_lora(number)  # otherwise vLLM may read it again from a folder that is deleted
        except Exception as error:
            self.check()
            with contextlib.suppress(Exception):  # vLLM may have loaded a part of it
                await core.llm.remove_lora(number)
            reason = str(error)[:_REASON_LENGTH_MAX] or type(error).__name__
            raise VersionUnusable(f"{version}: vLLM refuses the adapter: {reason}") from error
        return _LoadedVersion(manifest, core, adapter, number)

    # Requests

    def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        version: str,
        starts: Sequence[Start],
        *,
        stream: bool,
        share: Share = NOBODY,
    ) -> Stream:
        loaded = self._find(version)
        context = loaded.core.started.context_tokens
        if len(prompt) + (sampling.max_tokens or 1) > context:
            raise ContextLengthExceeded(len(prompt), sampling.max_tokens, context)
        refuse_unsupported(sampling, starts)
        check_tokens(prompt, starts, loaded.core.started.vocabulary)
        self.check()
        sequences_limit = self._settings.sequences_max + self._settings.waiting_max
        self._streams.check_capacity(len(starts), share.tenant, sequences_limit)
        priority = self._streams.of_tenant(share.tenant) + (_BACKGROUND_PRIORITY if share.background else 0)
        opened = self._streams.open(version, len(starts), share.tenant)
        limit = sampling.max_tokens or context - len(prompt)
        for number, start in enumerate(starts):
            request = request_of(sampling, start, limit - len(start.resumed), stream=stream, priority=priority + number)
            tokens = {"prompt_token_ids": [*prompt, *start.resumed], "cache_salt": f"{version}/{share.salt}"}
            converter = _OutputConverter(start, len(prompt), sampling, stream=stream)
            task = asyncio.create_task(self._sample(opened, loaded, tokens, request, converter))
            self._tasks.setdefault(opened, set()).add(task)
            task.add_done_callback(lambda done: self._forget(opened, done))
        metrics.RUNNING.labels(version).set(self.in_flight(version))
        return opened

    async def _sample(
        self, stream: Stream, loaded: _LoadedVersion, prompt: object, request: Request, converter: _OutputConverter
    ) -> None:
        """Sample one choice up to its end, and deliver its tokens to the stream."""
        version, core = loaded.version, loaded.core
        try:
            async with (
                core.separation.enter_request(request.logprobs > 0),
                contextlib.aclosing(self._outputs(loaded, prompt, request)) as outputs,
            ):
                async for output in outputs:
                    piece = converter.convert(output)
                    if piece is not None:
                        stream.put(piece)
                    if converter.finished:
                        return
            raise EngineFailed("vLLM ended a request without a reason")
        except EngineFailed as error:
            stream.put(EngineFailed(f"{version}: {error}"))
        except Exception as error:
            metrics.ENGINE_FAILURES.inc()
            log.exception("request_failed", version=version)
            stream.put(EngineFailed(f"{version}: {type(error).__name__} while computing"))

    def _logprob_function(self, loaded: _LoadedVersion) -> probing.LogprobFunction:
        """Return a function that computes the logprob of one token after a prompt under a loaded version.

        Each function has its own salt for vLLM's prompt cache, so that it reuses no prompt of earlier requests.
        """
        salt = f"{loaded.version}/{uuid.uuid4().hex}"

        async def logprob(prompt: Sequence[int], token: int) -> float:
            request = Request(max_tokens=1, delta=False, logprobs=1, logprob_token_ids=(token,))
            tokens = {"prompt_token_ids": list(prompt), "cache_salt": salt}
            async with contextlib.aclosing(self._outputs(loaded, tokens, request)) as outputs:
                async for output in outputs:
                    (sampled,) = output.outputs
                    if sampled.logprobs:
                        return sampled.logprobs[0][token].logprob
            raise EngineFailed(f"{loaded.version}: vLLM returned no logprobs")

        return logprob

    def _outputs(self, loaded: _LoadedVersion, prompt: object, request: Request) -> AsyncGenerator[RequestPiece, None]:
        request_id = f"{loaded.version}/{uuid.uuid4().hex}"
        parameters = self._library.parameters(request)
        return loaded.core.llm.generate(
            prompt, parameters, request_id, lora_request=loaded.adapter, priority=request.priority
        )

    def _abort(self, stream: Stream) -> None:
        for task in self._tasks.get(stream, ()):
            if task is not asyncio.current_task():
                task.cancel()

    def _forget(self, stream: Stream, task: asyncio.Task[None]) -> None:
        """Remove the task of a choice that has ended from the tasks of its stream."""
        tasks = self._tasks.get(stream)
        if tasks is not None:
            tasks.discard(task)
            if not tasks:
                del self._tasks[stream]
        if stream.version in self._loaded:
            metrics.RUNNING.labels(stream.version).set(self.in_flight(stream.version))

    # State

    def in_flight(self, version: str | None = None) -> int:
        return self._streams.in_flight(version)

    async def drained(self, version: str | None = None) -> None:
        await self._streams.drained(version)

    def context_tokens(self, version: str) -> int:
        return self._find(version).core.started.context_tokens

    def vocabulary(self, version: str) -> int:
        return self._find(version).core.started.vocabulary

    @property
    def alive(self) -> bool:
        return not self._stopped and not any(core.llm.errored for core in self._cores.values())

    def check(self) -> None:
        if self._stopped:
            raise EngineFailed("the engine was stopped")
        for core in self._cores.values():
            if core.llm.errored:
                error = EngineFailed(f"the engine core of {core.base} has died; the process must be restarted")
                self._streams.fail(error)
                raise error

    async def stop(self) -> None:
        self._stopped = True
        self._streams.fail(EngineFailed("the engine was stopped"))
        while self._starts:
            await asyncio.to_thread(self._library.abandon)
            await asyncio.sleep(0.05)
        self._starting.shutdown(wait=False)
        for task in [task for tasks in self._tasks.values() for task in tasks]:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        for core in self._cores.values():
            await core.stop()
        self._cores.clear()
        self._loaded.clear()

    def _find(self, version: str) -> _LoadedVersion:
        loaded = self._loaded.get(version)
        if loaded is None:
            raise UnknownVersion(version)
        return loaded


class _OutputConverter:
    """Converter of vLLM's outputs for one choice to tokens for the stream."""

    def __init__(self, start: Start, prompt_length: int, sampling: Sampling, *, stream: bool) -> None:
        self._start = start
        self._prompt_length = prompt_length
        self._top, self._ranked = sampling.top_logprobs, ranked_of(sampling)
        self._stream = stream
        self._all = Tokens(start.choice, sets=[] if self._ranked else None)
        self._begun = False
        self.finished = False

    def convert(self, output: RequestPiece) -> Tokens | None:
        """Return the tokens to deliver; None if there are none yet. Raises `EngineFailed` for an invalid output."""
        tokens = tokens_of(output, self._start.choice, self._prompt_length, self._top, self._ranked)
        tokens = cut_at_stop(tokens, self._start)
        self.finished = tokens.finish is not None
        metrics.SAMPLED_TOKENS.inc(len(tokens.token_ids))
        if not self._begun:
            self._begun = True
            metrics.PROMPT_TOKENS.labels("reused").inc(tokens.cached_tokens)
            computed = self._prompt_length + len(self._start.resumed) - tokens.cached_tokens
            metrics.PROMPT_TOKENS.labels("computed").inc(computed)
        if self._stream:
            return tokens if tokens.token_ids or tokens.finish else None
        self._all.add(tokens)
        if len(self._all.sets or ()) > STORED_SETS_MAX:
            self._all.sets = None
        return self._all if self.finished else None


def _shut_down(future: Future[StartedCore]) -> None:
    """Shut down a core whose load was cancelled."""
    if future.cancelled() or future.exception() is not None:
        return
    future.result().llm.shutdown()
