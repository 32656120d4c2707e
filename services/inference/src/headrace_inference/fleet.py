"""Versions of this replica. Those in routing are loaded and probed; those that routing drops are drained and unloaded.

A version is announced as ready only after its weights have reproduced its fingerprint. The failure of one version does
not affect the others. Versions are loaded one at a time, while others generate.
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
from headrace_inference.http.routes import ReadyVersion
from headrace_runtime.errors import CorruptBlob, Unavailable
from headrace_runtime.process.logs import get_logger
from headrace_runtime.storage.versions import VersionCache
from headrace_schemas import LoadedVersion, Probe, Routing, ServedVersion
from headrace_schemas.events.routing import Alias, LoadState
from headrace_schemas.values.blobs import BlobRef, Manifest
from headrace_schemas.values.text import storable

log = get_logger(__name__)
_ERROR_LENGTH_MAX = 2000
_LOGGED_TOKENS_MAX = 8
_ALIASES: tuple[Alias, ...] = ("champion", "canary", "previous")
"""Aliases in the order in which their versions are loaded. Versions without an alias come last."""


@dataclass(frozen=True)
class FleetLimits:
    """Limits of the versions on this replica. `InferenceSettings` describes them."""

    versions_max: int
    drain_s: float
    retry_s: float


@dataclass(slots=True)
class _LocalVersion:
    """State of one version on this replica. `tokenizer` is set while it answers requests."""

    version: str
    ref: BlobRef
    state: LoadState = "loading"
    error: str | None = None
    probe: Probe | None = None
    manifest: Manifest | None = None
    tokenizer: ChatTokenizer | None = None
    forms_error: str = ""
    """Reason why answers of this version cannot be constrained to a form; empty if they can."""
    loaded_at_s: int = 0
    lacks_room: bool = False
    """Whether the replica has no room for the version. It waits (`loading`) until another one is unloaded, or has
    failed for this reason only."""
    draining: object = None
    """Identity of the drain in progress. Routing may add a version again while it drains, and drop it once more."""


class _BaseNotReady(Exception):
    """Raised while the base of an adapter is still loading."""


class Fleet:
    """All versions on this replica. It loads and unloads them as routing changes."""

    def __init__(
        self,
        engine: Engine,
        cache: VersionCache,
        limits: FleetLimits,
        changed: Callable[[], None],
        check_forms: Callable[[ChatTokenizer, int], str] = lambda _tokenizer, _vocabulary: "",
    ) -> None:
        """Create a fleet without versions.

        Args:
            changed: function that is called after every change that heartbeats report. It must not block.
            check_forms: function that returns why answers cannot be constrained by grammars with a tokenizer and a
                vocabulary size, or an empty text if they can. It may block.
        """
        self._engine = engine
        self._cache = cache
        self._limits = limits
        self._changed = changed
        self._check_forms = check_forms
        self._local: dict[str, _LocalVersion] = {}
        self._routed: dict[str, BlobRef] = {}
        self._order = asyncio.Lock()
        """Held during a load or an unload, so that they run one at a time."""
        self._state_changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    # State

    def versions(self) -> tuple[LoadedVersion, ...]:
        """Return every version and its state, for the heartbeat."""
        return tuple(
            LoadedVersion(version=local.version, state=local.state, error=local.error, probe=local.probe)
            for local in self._local.values()
        )

    def supports_forms(self) -> bool:
        """Return whether answers of all loaded versions can be constrained by grammars (a request may name none)."""
        return not any(local.forms_error for local in self._local.values())

    def serving_versions(self) -> Sequence[ReadyVersion]:
        """Return all versions that answer now."""
        return [served for local in self._local.values() if (served := self._served(local)) is not None]

    def find_version(self, model: str) -> ReadyVersion:
        """Return an exact version, or the only ready version of a model. Raises `UnknownVersion`."""
        if "@" in model:
            served = self._served(self._local[model]) if model in self._local else None
            if served is None:
                raise UnknownVersion(model)
            return served
        ready = [served for served in self.serving_versions() if served.version.split("@")[0] == model]
        ready = [served for served in ready if self._local[served.version].state == "ready"]
        if len(ready) != 1:
            several = f" as one version but as {len(ready)}: name one of them" if ready else ""
            raise UnknownVersion(model, several)
        return ready[0]

    # Changes of routing

    def follow(self, tables: Iterable[Routing]) -> None:
        """Start loading and draining versions to match the routing tables of all models. Returns immediately."""
        self._routed = {
            item.version: item.manifest for table in tables for item in sorted(table.serve, key=_loading_order(table))
        }
        self._reconcile()

    async def close(self) -> None:
        """Stop loading and draining. Loaded versions remain until the engine stops."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _reconcile(self) -> None:
        for local in list(self._local.values()):
            if local.version not in self._routed:
                self._drop(local)
        for version, ref in self._routed.items():
            present = self._local.get(version)
            if present is None or (present.lacks_room and (self._has_capacity() or present.state == "loading")):
                self._begin(_LocalVersion(version, ref))
            elif present.state == "draining":  # routing added it again before it was unloaded
                present.draining = None
                self._set(present, "ready")

    def _begin(self, local: _LocalVersion) -> None:
        """Start loading a version, or let it wait if the replica has too many versions."""
        has_capacity = self._has_capacity()
        self._local[local.version] = local
        if has_capacity:
            self._start(self._load(local))
            self._changed()
        else:
            self._wait_or_fail(
                local, f"inference.versions_max: {self._limits.versions_max} versions are loaded already"
            )

    def _has_capacity(self) -> bool:
        present = sum(local.state != "failed" and not local.lacks_room for local in self._local.values())
        return present < self._limits.versions_max

    def _wait_or_fail(self, local: _LocalVersion, reason: str) -> None:
        """Handle a version for which the replica has no room.

        It waits if another version is draining, which will make room. Otherwise it fails, which is final, because the
        registry does not route a failed version again.
        """
        local.lacks_room = True
        if any(other.state == "draining" for other in self._local.values()):
            log.info("version_waits", version=local.version, error=reason)
            self._set(local, "loading")
        else:
            self._fail(local, reason)

    def _drop(self, local: _LocalVersion) -> None:
        """Stop serving a version: a ready one first finishes its calls (drains), any other one is removed at once."""
        if local.state == "ready":
            local.draining = object()
            self._set(local, "draining")
            self._start(self._drain(local, local.draining))
        elif local.state != "draining":
            del self._local[local.version]  # a load in progress checks for this
            self._state_changed.set()
            self._changed()

    # Loading and unloading

    async def _load(self, local: _LocalVersion) -> None:
        """Load a version, and retry until it is ready, has failed permanently, or is no longer in routing."""
        while self._local.get(local.version) is local:
            try:
                async with self._order:
                    with metrics.LOAD_SECONDS.time():
                        await self._load_once(local)
            except _BaseNotReady:
                self._state_changed.clear()
                await self._state_changed.wait()
            except Unavailable as error:
                log.warning("version_waits", version=local.version, error=str(error))
                self._report_wait(local, str(error))
                await asyncio.sleep(self._limits.retry_s)
            except NoRoom as error:
                self._wait_or_fail(local, str(error))
                return
            except (VersionUnusable, CorruptBlob) as error:
                self._fail(local, str(error))
                return
            except Exception as error:
                log.exception("load_failed", version=local.version)
                self._fail(local, f"{type(error).__name__}: {error}")
                return
            else:
                return

    async def _load_once(self, local: _LocalVersion) -> None:
        """Fetch, check, load and probe a version, then announce it as ready."""
        manifest, folder = await self._cache.fetch(local.ref)
        self._check(local, manifest)
        self._check_base(manifest)
        tokenizer = await self._tokenizer(manifest, folder)
        await self._engine.load(folder, manifest)
        try:
            local.probe = await self._engine.probe(local.version)
            _check_probe(local.version, local.probe)
        except BaseException:
            await self._engine.unload(local.version)
            raise
        vocabulary = self._engine.vocabulary(local.version)
        forms_error = await asyncio.to_thread(self._check_forms, tokenizer, vocabulary)
        if self._local.get(local.version) is not local:  # routing dropped it during the load
            await self._engine.unload(local.version)
            return
        local.forms_error = forms_error
        if forms_error:
            log.error("forms_not_held", version=local.version, reason=forms_error)
        _report_tokens_without_row(local.version, tokenizer, vocabulary)
        local.manifest, local.tokenizer, local.loaded_at_s, local.error = manifest, tokenizer, int(time.time()), None
        metrics.LOADS.labels("ready").inc()
        log.info("version_ready", version=local.version, max_abs_delta=local.probe.max_abs_delta)
        self._set(local, "ready")

    async def _drain(self, local: _LocalVersion, drain: object) -> None:
        """Unload a version once gateways know of the change and its requests are finished.

        Args:
            local: the version.
            drain: identity of this drain. The version stays loaded if routing has added it again meanwhile, even if a
                later drain has begun.
        """
        await asyncio.sleep(self._limits.drain_s)
        await self._engine.drained(local.version)
        if local.draining is not drain:
            return
        del self._local[local.version]
        self._changed()
        async with self._order:  # if routing adds it again, its next load waits for this
            await self._engine.unload(local.version)
            await asyncio.to_thread(self._cache.keep_only, set(self._local))
        log.info("version_unloaded", version=local.version)
        self._reconcile()  # a waiting version can now be loaded

    # Rules

    def _check(self, local: _LocalVersion, manifest: Manifest) -> None:
        """Check that a manifest is that of the version to load, and that its model's versions have one tokenizer.

        Raises:
            VersionUnusable: the manifest or the tokenizer differs.
        """
        if manifest.version != local.version:
            raise VersionUnusable(f"{local.version}: its manifest is that of {manifest.version}")
        for other in self._local.values():
            if other.manifest is None or other.manifest.name != manifest.name:
                continue
            for field in ("tokenizer_sha256", "template_sha256"):
                if getattr(other.manifest, field) != getattr(manifest, field):
                    raise VersionUnusable(f"{local.version}: {field} differs from that of {other.version}, loaded here")
            path = _differing_file(manifest, other.manifest)
            if path:
                raise VersionUnusable(f"{local.version}: {path} differs from that of {other.version}, loaded here")

    def _check_base(self, manifest: Manifest) -> None:
        """Check that the base of an adapter is ready.

        Raises:
            _BaseNotReady: the base is loading.
            VersionUnusable: the base has failed or is not in routing.
        """
        base = self._local.get(manifest.base or "")
        if manifest.base is None or (base is not None and base.tokenizer is not None):
            return
        if base is None or base.state == "failed":
            reason = "is not in routing" if base is None else f"failed: {base.error}"
            raise VersionUnusable(f"{manifest.version}: its base {manifest.base} {reason}")
        raise _BaseNotReady

    async def _tokenizer(self, manifest: Manifest, folder: Path) -> ChatTokenizer:
        """Return the tokenizer of a version: that of the base for an adapter. Versions with equal files share one."""
        if manifest.kind == "lora":
            base = self._local.get(manifest.base or "")
            if (
                base is None
                or base.tokenizer is None
                or base.manifest is None
                or not _same_tokenizer(base.manifest, manifest)
            ):
                raise VersionUnusable(f"{manifest.version}: its tokenizer or template is not that of its base")
            return base.tokenizer
        for other in self._local.values():
            same = other.manifest is not None and other.manifest.prompt_sha256 == manifest.prompt_sha256
            if same and other.tokenizer is not None:
                return other.tokenizer
        return await asyncio.to_thread(ChatTokenizer, folder, manifest)

    def _served(self, local: _LocalVersion) -> ReadyVersion | None:
        if local.tokenizer is None or local.manifest is None:
            return None
        context = self._engine.context_tokens(local.version)
        return ReadyVersion(local.version, local.tokenizer, context, local.loaded_at_s, local.manifest.parent)

    def _set(self, local: _LocalVersion, state: LoadState) -> None:
        local.state = state
        self._state_changed.set()
        self._changed()

    def _report_wait(self, local: _LocalVersion, reason: str) -> None:
        """Store the reason why a version is not loaded yet, so that the replica's next heartbeat contains it."""
        if local.error != (error := storable(reason[:_ERROR_LENGTH_MAX])):
            local.error = error
            self._changed()

    def _fail(self, local: _LocalVersion, error: str) -> None:
        log.error("version_failed", version=local.version, error=error)
        metrics.LOADS.labels("failed").inc()
        local.error = storable(error[:_ERROR_LENGTH_MAX])
        self._set(local, "failed")

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _loading_order(table: Routing) -> Callable[[ServedVersion], int]:
    """Return the sort key that orders versions of a routing table for loading: those with an alias first, by its
    importance."""
    order = {table.aliases[alias]: rank for rank, alias in reversed([*enumerate(_ALIASES)]) if alias in table.aliases}
    return lambda item: order.get(item.version, len(_ALIASES))


def _check_probe(version: str, probe: Probe) -> None:
    """Raise `VersionUnusable` if the weights failed the probe."""
    metrics.PROBE_DELTA.labels("fingerprint").set(probe.max_abs_delta)
    if probe.parent_max_abs_delta is not None:
        metrics.PROBE_DELTA.labels("parent").set(probe.parent_max_abs_delta)
    if probe.passed:
        return
    if probe.parent_max_abs_delta == 0:
        raise VersionUnusable(f"{version}: its logprobs equal those of its parent; the new weights were not loaded")
    raise VersionUnusable(f"{version}: its logprobs differ by {probe.max_abs_delta:.3g} from its fingerprint")


def _report_tokens_without_row(version: str, tokenizer: ChatTokenizer, vocabulary: int) -> None:
    """Log the tokenizer's tokens whose ids exceed the model's vocabulary. Requests with one of them are refused."""
    outside = tokenizer.tokens_from(vocabulary)
    if outside:
        log.warning(
            "tokens_without_row",
            version=version,
            tokens=outside[:_LOGGED_TOKENS_MAX],
            count=len(outside),
            remedy=f"the embedding has {vocabulary} rows; resize it to the tokenizer, or remove these added tokens",
        )


def _same_tokenizer(left: Manifest, right: Manifest) -> bool:
    return (left.tokenizer_sha256, left.template_sha256) == (right.tokenizer_sha256, right.template_sha256)


def _differing_file(left: Manifest, right: Manifest) -> str:
    """Return the path of a file that affects tokenization and differs; empty if there is none, or for adapters."""
    if "lora" in (left.kind, right.kind):
        return ""
    left_files, right_files = left.token_files, right.token_files
    paths = sorted({*left_files, *right_files})
    return next((path for path in paths if left_files.get(path) != right_files.get(path)), "")
