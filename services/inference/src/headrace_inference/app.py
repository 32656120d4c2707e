"""Composition root of the inference service."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from pathlib import Path

from headrace_inference import metrics
from headrace_inference.announce import Announcer, RoutingFollower
from headrace_inference.chat.exact import ExactPrompts
from headrace_inference.chat.parsers import REASONING_PARSERS, TOOL_PARSERS, Parsers
from headrace_inference.chat.tokenizer import ChatTokenizer, RenderLimits
from headrace_inference.engine import ENGINES, AnswerScorer, Engine
from headrace_inference.fleet import Fleet, FleetLimits
from headrace_inference.grammar.compiler import GrammarCompiler
from headrace_inference.http.completions import Completions
from headrace_inference.http.routes import Api, RequestBounds
from headrace_inference.settings import InferenceSettings
from headrace_runtime.clock import SystemClock
from headrace_runtime.errors import Unavailable
from headrace_runtime.http import web
from headrace_runtime.http.guard import sign_replica
from headrace_runtime.kafka import topics
from headrace_runtime.kafka.dead_letters import DeadLetterSender
from headrace_runtime.kafka.producer import EventProducer
from headrace_runtime.main import PYTHON_GARBAGE_THRESHOLD, tune_garbage_collection
from headrace_runtime.process.event_loop import WorkerThreads
from headrace_runtime.process.logs import get_logger
from headrace_runtime.settings.sections import Common
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.storage.versions import VersionCache
from headrace_schemas import Replica
from headrace_schemas.http.answer_form import RESPONSE_FORMAT, TOOL_CHOICE
from headrace_schemas.values.base import utcnow

_PROMPT_MEMORY_TOKENS_MAX = 4_194_304
"""Token ids of past prompts and answers that are remembered, so that a conversation continues with its exact
tokens."""
_PREPARE_THREADS = 2
"""Threads that parse and tokenize requests outside the event loop. One more thread handles requests over 256 KiB."""
_PROMPT_BYTES_MAX = 1_048_576
"""Largest prompt in bytes of text, template and tools included, that is tokenized. It is more than any context
holds."""
_TEMPLATE_TIMEOUT_S = 10.0
"""Seconds that the chat template may take for the messages of one request."""
_BODY_BYTES_MAX = 16_777_216
"""Largest request body."""
_CHOICES_MAX = 16
"""Largest `n` of a request."""
_RETRY_S = 2.0
"""Pause before a version is fetched again after the blob store was unavailable."""
_JSON_VALUES_MAX = 32_768
"""Largest number of values in the JSON of a request body, counted by commas and brackets outside of strings. It
determines the cost of parsing."""
_STOP_TIMEOUT_S = 20.0
"""Seconds that a clean stop waits for the requests in flight."""

log = get_logger(__name__)
SERVICE = "inference"
_ENGINE_CHECK_S = 1.0
_INLINE_BYTES = 8192
"""Requests up to this size are tokenized in the event loop, which takes about the time of one decode step."""


def start_engine(settings: InferenceSettings) -> Engine:
    """Start the engine that the settings name, and exempt the objects of its imports from garbage collection.

    With torch and transformers a full collection takes 0.2 s, in which no thread can run. The tensors of versions are
    loaded later, so they are not exempt.
    """
    engine = ENGINES.get(settings.engine).make(settings.of(settings.engine))
    tune_garbage_collection(PYTHON_GARBAGE_THRESHOLD)
    return engine


async def run(common: Common, settings: InferenceSettings) -> None:
    """Run the replica until cancelled.

    Raises:
        Unavailable: the bus or the port is not available.
        EngineFailed: the engine has failed, and the process must be restarted.
    """
    await topics.ensure(common.bus)
    blobs = BlobStore.open(common)
    async with contextlib.AsyncExitStack() as stack:
        producer = EventProducer(common.bus, f"headrace/{SERVICE}", blobs)
        await producer.start()
        stack.push_async_callback(producer.stop)
        engine = start_engine(settings)
        stack.push_async_callback(engine.stop)
        metrics.ENGINE.info(
            {
                "engine": settings.engine,
                "tool_parser": settings.tool_parser,
                "reasoning_parser": settings.reasoning_parser,
            }
        )
        change = asyncio.Event()
        parsers = Parsers(TOOL_PARSERS.get(settings.tool_parser), REASONING_PARSERS.get(settings.reasoning_parser))
        parsers.check()
        grammars = GrammarCompiler(parsers)
        stack.callback(grammars.close)
        cache = VersionCache(blobs, _cache_folder(common, settings), common.disk_free_bytes_min)
        forms = _supported_forms(engine, parsers)
        check_forms = grammars.check if forms else _no_check
        fleet = Fleet(engine, cache, _fleet_limits(settings), change.set, check_forms)
        stack.push_async_callback(fleet.close)
        refuse = DeadLetterSender(SERVICE, producer, common.data_dir / "inference")
        follower = RoutingFollower(common.bus, SERVICE, blobs, refuse, fleet.follow)
        worker_threads = WorkerThreads(_PREPARE_THREADS, _INLINE_BYTES)
        stack.callback(worker_threads.close)
        application = _api(common, settings, fleet, engine, worker_threads, parsers, grammars).app(
            {"engine": lambda: engine.alive, "routing": lambda: follower.is_ready}
        )
        port = await stack.enter_async_context(web.serve(application, settings, common.security))
        announcer = Announcer(
            producer,
            SystemClock(),
            sign_replica(_identity(settings, port, engine, forms), common.security),
            fleet.versions,
            engine.in_flight,
            settings.heartbeat_s,
            change,
            fleet.supports_forms,
        )
        log.info("serving", port=port, replica=announcer.replica_id)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(follower.run())
                tasks.create_task(announcer.run())
                tasks.create_task(_watch(engine))
        finally:
            await _shut_down(announcer, engine, _STOP_TIMEOUT_S)


async def _watch(engine: Engine) -> None:
    while True:
        engine.check()
        await asyncio.sleep(_ENGINE_CHECK_S)


async def _shut_down(announcer: Announcer, engine: Engine, timeout_s: float) -> None:
    """Announce that the replica stops, wait at most `timeout_s` for its requests, and delete its record on
    `replicas`."""
    with contextlib.suppress(Unavailable):
        await announcer.announce(stopping=True)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            if engine.alive:
                await engine.drained()
    with contextlib.suppress(Unavailable):
        await announcer.withdraw()


def _api(
    common: Common,
    settings: InferenceSettings,
    fleet: Fleet,
    engine: Engine,
    worker_threads: WorkerThreads,
    parsers: Parsers,
    grammars: GrammarCompiler,
) -> Api:
    prompts = ExactPrompts(_PROMPT_MEMORY_TOKENS_MAX, parsers)
    rendering = RenderLimits(_PROMPT_BYTES_MAX, _TEMPLATE_TIMEOUT_S)
    completions = Completions(engine, prompts, parsers, worker_threads, grammars, rendering)
    limits = RequestBounds(_BODY_BYTES_MAX, _CHOICES_MAX, _JSON_VALUES_MAX)
    return Api(common, fleet, completions, limits, worker_threads)


def _fleet_limits(settings: InferenceSettings) -> FleetLimits:
    return FleetLimits(settings.versions_max, settings.drain_s, _RETRY_S)


def _supported_forms(engine: Engine, parsers: Parsers) -> tuple[str, ...]:
    """Return the request fields `response_format` and `tool_choice`, as far as engine and tool parser support them."""
    if not engine.grammars:
        return ()
    return (RESPONSE_FORMAT, TOOL_CHOICE) if parsers.tools.form is not None else (RESPONSE_FORMAT,)


def _no_check(_tokenizer: ChatTokenizer, _vocabulary: int) -> str:
    """Return an empty text: every tokenizer is accepted, because this replica does not constrain answers by
    grammars."""
    return ""


def _identity(settings: InferenceSettings, port: int, engine: Engine, forms: tuple[str, ...]) -> Replica:
    host = _reachable(settings.host)
    now = utcnow()
    return Replica(
        time=now,
        replica_id=settings.replica_id or f"{host}:{port}",
        url=settings.advertise_url or f"http://{f'[{host}]' if ':' in host else host}:{port}",
        engine=engine.name,
        resumes=engine.resumes,
        histories=True,
        prompts=True,
        scores=isinstance(engine, AnswerScorer),
        grammars=forms,
        capacity=engine.capacity,
        ttl_s=settings.ttl_s,
        started_at=now,
    )


def _reachable(host: str) -> str:
    """Return the host name under which others reach the replica: the machine's name if it listens on all addresses."""
    return socket.gethostname() if host in ("0.0.0.0", "::") else host  # noqa: S104 (compared, not bound)


def _cache_folder(common: Common, settings: InferenceSettings) -> Path:
    """Return the folder of unpacked versions.

    Each replica has its own, because it removes versions it does not serve.
    """
    name = settings.replica_id or f"{_reachable(settings.host)}-{settings.port}"
    return common.data_dir / SERVICE / re.sub(r"[^A-Za-z0-9._-]", "_", name)
