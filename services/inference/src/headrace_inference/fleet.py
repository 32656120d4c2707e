"""The versions of this replica: what routing wants is loaded and probed, what it dropped is drained and unloaded.

A version is announced ready only after its own weights answered as its fingerprint says. One
version's failure is its own state and stops nothing else. Loading goes on beside generation, one version at a time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace_inference import metrics
from headrace_inference.chat.tokenizer import ChatTokenizer
from headrace_inference.engine import Engine
from headrace_inference.errors import NoRoom, UnknownVersion, VersionUnusable
from headrace_inference.http.routes import Served
from headrace_runtime.errors import CorruptBlob, Unavailable
from headrace_runtime.logs import get_logger
from headrace_runtime.versions import VersionCache
from headrace_schemas import LoadedVersion, Probe, Routing, ServedVersion
from headrace_schemas.blobs import BlobRef
from headrace_schemas.events.routing import Alias, LoadState
from headrace_schemas.manifest import Manifest

log = get_logger(__name__)
_ERROR_LENGTH_MAX = 2000
_SHOWN_TOKENS = 8
_ALIASES: tuple[Alias, ...] = ("champion", "canary", "previous")
"""In the order in which they are loaded; versions without an alias come last."""


@dataclass(frozen=True)
class FleetLimits:
    """How much is held, and how long a dropped version still answers; settings say what each means."""

    versions_max: int
    drain_s: float
    retry_s: float


@dataclass(slots=True)
class _Held:
    """One version here. `tokenizer` is set while it answers."""

    version: str
    ref: BlobRef
    state: LoadState = "loading"
    error: str | None = None
    probe: Probe | None = None
    manifest: Manifest | None = None
    tokenizer: ChatTokenizer | None = None
    no_forms: str = ""
    """Why its answers cannot be held to a form; empty while they can."""
    loaded_at_s: int = 0
    crowded: bool = False
    """It has no room: it waits for that (`loading`), or failed for want of it only."""
    draining: object = None
    """Identifies the drop that drains it; a version can be wanted again before it is gone, and dropped again."""


class _BaseFirst(Exception):
    """An adapter has to wait for its base."""


class Fleet:
    """Follows routing. `changed` is called after every change that others should hear of; it must not block."""

    def __init__(
        self,
        engine: Engine,
        cache: VersionCache,
        limits: FleetLimits,
        changed: Callable[[], None],
        check_forms: Callable[[ChatTokenizer, int], str] = lambda _tokenizer, _vocabulary: "",
    ) -> None:
        """`check_forms` returns why answers with such a tokenizer and vocabulary cannot be held to a form. It may
        block."""
        self._engine = engine
        self._cache = cache
        self._limits = limits
        self._changed = changed
        self._check_forms = check_forms
        self._held: dict[str, _Held] = {}
        self._wanted: dict[str, BlobRef] = {}
        self._order = asyncio.Lock()
        """One load or unload at a time."""
        self._news = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    # What others see

    def versions(self) -> tuple[LoadedVersion, ...]:
        """Every version and its state, for the heartbeat."""
        return tuple(
            LoadedVersion(version=held.version, state=held.state, error=held.error, probe=held.probe)
            for held in self._held.values()
        )

    def holds_forms(self) -> bool:
        """Return whether an answer of every version here can be held to a form; requests do not name their version."""
        return not any(held.no_forms for held in self._held.values())

    def serving(self) -> Sequence[Served]:
        return [served for held in self._held.values() if (served := self._served(held)) is not None]

    def find(self, model: str) -> Served:
        if "@" in model:
            served = self._served(self._held[model]) if model in self._held else None
            if served is None:
                raise UnknownVersion(model)
            return served
        ready = [served for served in self.serving() if served.version.split("@")[0] == model]
        ready = [served for served in ready if self._held[served.version].state == "ready"]
        if len(ready) != 1:
            several = f" as one version but as {len(ready)}: name one of them" if ready else ""
            raise UnknownVersion(model, several)
        return ready[0]

    # What routing wants

    def follow(self, tables: Iterable[Routing]) -> None:
        """Bring the versions in line with the routing tables of all models. Returns at once; tasks do the work."""
        self._wanted = {
            item.version: item.manifest for table in tables for item in sorted(table.serve, key=_urgency(table))
        }
        self._reconcile()

    async def close(self) -> None:
        """Stop loading and draining; what is loaded stays until the engine stops."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _reconcile(self) -> None:
        for held in list(self._held.values()):
            if held.version not in self._wanted:
                self._drop(held)
        for version, ref in self._wanted.items():
            known = self._held.get(version)
            if known is None or (known.crowded and (self._room() or known.state == "loading")):
                self._begin(_Held(version, ref))
            elif known.state == "draining":  # wanted again before it was gone
                known.draining = None
                self._set(known, "ready")

    def _begin(self, held: _Held) -> None:
        room = self._room()
        self._held[held.version] = held
        if room:
            self._start(self._load(held))
            self._changed()
        else:
            self._crowd(held, f"{self._limits.versions_max} versions are held already, versions_max allows no more")

    def _room(self) -> bool:
        here = sum(held.state != "failed" and not held.crowded for held in self._held.values())
        return here < self._limits.versions_max

    def _crowd(self, held: _Held, why: str) -> None:
        """There is no room for it. A version that drains makes some soon, and is waited for: whoever is told of a
        failure never asks for the version again."""
        held.crowded = True
        if any(other.state == "draining" for other in self._held.values()):
            log.info("version_waits", version=held.version, error=why)
            self._set(held, "loading")
        else:
            self._fail(held, why)

    def _drop(self, held: _Held) -> None:
        if held.state == "ready":
            held.draining = object()
            self._set(held, "draining")
            self._start(self._drain(held, held.draining))
        elif held.state != "draining":
            del self._held[held.version]  # a load that is under way notices
            self._news.set()
            self._changed()

    # The work

    async def _load(self, held: _Held) -> None:
        """Until the version is ready, has failed for good, or is no longer wanted."""
        while self._held.get(held.version) is held:
            try:
                async with self._order:
                    with metrics.LOAD_SECONDS.time():
                        await self._load_once(held)
            except _BaseFirst:
                self._news.clear()
                await self._news.wait()
            except Unavailable as error:
                log.warning("version_waits", version=held.version, error=str(error))
                self._report_wait(held, str(error))
                await asyncio.sleep(self._limits.retry_s)
            except NoRoom as error:
                self._crowd(held, str(error))
                return
            except (VersionUnusable, CorruptBlob) as error:
                self._fail(held, str(error))
                return
            except Exception as error:
                log.exception("load_failed", version=held.version)
                self._fail(held, f"{type(error).__name__}: {error}")
                return
            else:
                return

    async def _load_once(self, held: _Held) -> None:
        manifest, folder = await self._cache.fetch(held.ref)
        self._check(held, manifest)
        self._check_base(manifest)
        tokenizer = await self._tokenizer(manifest, folder)
        await self._engine.load(folder, manifest)
        try:
            held.probe = await self._engine.probe(held.version)
            _judge(held.version, held.probe)
        except BaseException:
            await self._engine.unload(held.version)
            raise
        vocabulary = self._engine.vocabulary(held.version)
        no_forms = await asyncio.to_thread(self._check_forms, tokenizer, vocabulary)
        if self._held.get(held.version) is not held:  # dropped while it was loading
            await self._engine.unload(held.version)
            return
        held.no_forms = no_forms
        if no_forms:
            log.error("forms_not_held", version=held.version, reason=no_forms)
        _report_tokens_without_row(held.version, tokenizer, vocabulary)
        held.manifest, held.tokenizer, held.loaded_at_s, held.error = manifest, tokenizer, int(time.time()), None
        metrics.LOADS.labels("ready").inc()
        log.info("version_ready", version=held.version, max_abs_delta=held.probe.max_abs_delta)
        self._set(held, "ready")

    async def _drain(self, held: _Held, drop: object) -> None:
        """Answer until gateways have heard of it, finish what was begun, then forget the version."""
        await asyncio.sleep(self._limits.drain_s)
        await self._engine.drained(held.version)
        if held.draining is not drop:
            return
        del self._held[held.version]
        self._changed()
        async with self._order:  # if it is wanted again, its next load waits behind this
            await self._engine.unload(held.version)
            await asyncio.to_thread(self._cache.keep_only, set(self._held))
        log.info("version_unloaded", version=held.version)
        self._reconcile()  # there is room for another one

    # Rules

    def _check(self, held: _Held, manifest: Manifest) -> None:
        """Raises `VersionUnusable` when the manifest is not what routing named, or changes the model's tokens (P7)."""
        if manifest.version != held.version:
            raise VersionUnusable(f"{held.version}: its manifest is that of {manifest.version}")
        for other in self._held.values():
            if other.manifest is None or other.manifest.name != manifest.name:
                continue
            for what in ("tokenizer_sha256", "template_sha256"):
                if getattr(other.manifest, what) != getattr(manifest, what):
                    raise VersionUnusable(f"{held.version}: {what} differs from that of {other.version}, loaded here")
            differing = _differing(manifest, other.manifest)
            if differing:
                raise VersionUnusable(f"{held.version}: {differing} differs from that of {other.version}, loaded here")

    def _check_base(self, manifest: Manifest) -> None:
        """An adapter's base must be ready. Raises `_BaseFirst` while it is on its way, else `VersionUnusable`."""
        base = self._held.get(manifest.base or "")
        if manifest.base is None or (base is not None and base.tokenizer is not None):
            return
        if base is None or base.state == "failed":
            why = "is not in routing" if base is None else f"failed: {base.error}"
            raise VersionUnusable(f"{manifest.version}: its base {manifest.base} {why}")
        raise _BaseFirst

    async def _tokenizer(self, manifest: Manifest, folder: Path) -> ChatTokenizer:
        """The tokenizer of a version; an adapter has its base's."""
        if manifest.kind == "lora":
            base = self._held.get(manifest.base or "")
            if base is None or base.tokenizer is None or base.manifest is None or not _same(base.manifest, manifest):
                raise VersionUnusable(f"{manifest.version}: its tokenizer or template is not that of its base")
            return base.tokenizer
        for other in self._held.values():
            same = other.manifest is not None and other.manifest.prompt_sha256 == manifest.prompt_sha256
            if same and other.tokenizer is not None:
                return other.tokenizer
        return await asyncio.to_thread(ChatTokenizer, folder, manifest)

    def _served(self, held: _Held) -> Served | None:
        if held.tokenizer is None or held.manifest is None:
            return None
        context = self._engine.context_tokens(held.version)
        return Served(held.version, held.tokenizer, context, held.loaded_at_s, held.manifest.parent)

    def _set(self, held: _Held, state: LoadState) -> None:
        held.state = state
        self._news.set()
        self._changed()

    def _report_wait(self, held: _Held, reason: str) -> None:
        """Let the next heartbeat name what the version waits for."""
        if held.error != reason[:_ERROR_LENGTH_MAX]:
            held.error = reason[:_ERROR_LENGTH_MAX]
            self._changed()

    def _fail(self, held: _Held, error: str) -> None:
        log.error("version_failed", version=held.version, error=error)
        metrics.LOADS.labels("failed").inc()
        held.error = error[:_ERROR_LENGTH_MAX]
        self._set(held, "failed")

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _urgency(table: Routing) -> Callable[[ServedVersion], int]:
    order = {table.aliases[alias]: place for place, alias in reversed([*enumerate(_ALIASES)]) if alias in table.aliases}
    return lambda item: order.get(item.version, len(_ALIASES))


def _judge(version: str, probe: Probe) -> None:
    """Raises `VersionUnusable` when the weights do not answer as they should."""
    metrics.PROBE_DELTA.labels("fingerprint").set(probe.max_abs_delta)
    if probe.parent_max_abs_delta is not None:
        metrics.PROBE_DELTA.labels("parent").set(probe.parent_max_abs_delta)
    if probe.passed:
        return
    if probe.parent_max_abs_delta == 0:
        raise VersionUnusable(f"{version}: answers exactly as its parent does; the new weights never arrived")
    raise VersionUnusable(f"{version}: its logprobs differ by {probe.max_abs_delta:.3g} from its fingerprint")


def _report_tokens_without_row(version: str, tokenizer: ChatTokenizer, vocabulary: int) -> None:
    """Log which tokens of the tokenizer no prompt may hold: a request that writes one is refused."""
    outside = tokenizer.tokens_from(vocabulary)
    if outside:
        log.warning(
            "tokens_without_row",
            version=version,
            tokens=outside[:_SHOWN_TOKENS],
            count=len(outside),
            remedy=f"the embedding has {vocabulary} rows; resize it to the tokenizer, or remove these added tokens",
        )


def _same(one: Manifest, other: Manifest) -> bool:
    return (one.tokenizer_sha256, one.template_sha256) == (other.tokenizer_sha256, other.template_sha256)


def _differing(one: Manifest, other: Manifest) -> str:
    """A file that makes other tokens of a conversation, empty when there is none. Adapters have their base's."""
    if "lora" in (one.kind, other.kind):
        return ""
    mine, theirs = one.token_files, other.token_files
    return next((path for path in sorted({*mine, *theirs}) if mine.get(path) != theirs.get(path)), "")
