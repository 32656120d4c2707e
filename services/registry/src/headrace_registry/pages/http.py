"""Helpers that all REST endpoints share: request bodies, parameters, JSON of models and versions, and the execution of
changes.

A refused change leaves the state as it was. After a successful response, the change is durable and its events are
published.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from typing import TypeVar

from pydantic import ValidationError
from sqlalchemy.ext.asyncio import AsyncConnection
from starlette.requests import Request
from starlette.responses import Response

from headrace_registry.storage import audit, store
from headrace_registry.storage.leader import LeaderLease, LostLeadership
from headrace_registry.storage.records import ModelRecord, VersionRecord
from headrace_registry.versions import probe
from headrace_registry.versions.transition import Transition
from headrace_runtime.errors import Refused, Unavailable
from headrace_runtime.http.web import require_internal_key
from headrace_runtime.settings.sections import Common
from headrace_runtime.stream.processor import Processor
from headrace_schemas import Event, ModelEvent, Replica
from headrace_schemas.http.registry_api import ModelState, VersionState
from headrace_schemas.values.base import Model

_BODY_BYTES_MAX = 65_536
_LIST_MAX = 1000
M = TypeVar("M", bound=Model)
Page = Callable[[Request], Awaitable[Response]]
_TROUBLE_LENGTH_MAX = 4096
Work = Callable[[AsyncConnection, datetime, Transition], Awaitable[str | None]]
"""Function that makes a change in a transaction, or raises `Refused`. It returns a detail for the audit log, or
None."""


def require_key(common: Common, page: Page) -> Page:
    """Return `page` wrapped so that each request must contain the internal key, if one is set."""

    async def guarded(request: Request) -> Response:
        require_internal_key(request, common)
        return await page(request)

    return guarded


def json_response(value: Model, status: int = 200) -> Response:
    """Return a response with `value` as JSON. Fields that are None are left out."""
    return Response(value.model_dump_json(exclude_none=True), status, media_type="application/json")


async def read_body(request: Request, model: type[M]) -> M:
    """Parse the JSON body of a request to a `model`. Raises `Refused` 400 or 413."""
    content = b""
    async for chunk in request.stream():
        content += chunk
        if len(content) > _BODY_BYTES_MAX:
            raise Refused(413, "body_too_large", f"the body is larger than {_BODY_BYTES_MAX} bytes")
    try:
        return model.model_validate_json(content or b"{}")
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise Refused(400, "invalid_request", f"{where or 'body'}: {first['msg']}", where or None) from None


def limit_parameter(parameters: Mapping[str, str]) -> int:
    """Return the query parameter `limit`, the maximum number of entries of a list. Raises `Refused` 400."""
    return number_parameter(parameters, "limit", 100, _LIST_MAX)


def number_parameter(parameters: Mapping[str, str], name: str, default: int, most: int) -> int:
    """Return a numeric query parameter, which must be from 1 to `most`. Raises `Refused` 400."""
    text = parameters.get(name, str(default))
    if not (text.isascii() and text.isdecimal()) or len(text) > 19 or not 1 <= int(text) <= most:
        raise Refused(400, "invalid_request", f"{name} must be a number from 1 to {most}", name)
    return int(text)


async def model_state(
    tx: AsyncConnection, record: ModelRecord, replicas: Sequence[Replica] | None = None
) -> ModelState:
    """Return the state of a model as the REST interface shows it.

    Args:
        replicas: the live replicas, from which the field `trouble` is computed; None to leave it out.
    """
    return ModelState(
        id=record.model,
        champion=record.champion,
        previous=record.previous,
        candidate=record.candidate,
        pinned=record.pinned,
        paused=record.paused,
        anchor=record.anchor or record.champion,
        trials=record.trials,
        aliases=await store.aliases(tx, record.model),
        revision=record.revision,
        trouble=None if replicas is None else await _trouble(tx, record, replicas),
    )


async def _trouble(tx: AsyncConnection, record: ModelRecord, replicas: Sequence[Replica]) -> str | None:
    """Return why no replica serves the model, or which manifest cannot be read; None without either."""
    reasons = [await _unserved_reason(tx, record, replicas)]
    for name, problem in (await store.unreadable_manifests(tx, record.model)).items():
        reasons.append(f"{name}: its manifest cannot be read: {problem}")
    return "; ".join(filter(None, reasons))[:_TROUBLE_LENGTH_MAX] or None


async def _unserved_reason(tx: AsyncConnection, record: ModelRecord, replicas: Sequence[Replica]) -> str | None:
    """Return the reason why no replica serves the model, or None if one serves it.

    If the model has no champion, it is the progress of the candidate, or the reason why the newest version was
    rejected.
    """
    if record.champion is not None:
        reason = probe.unserved_reason(record.champion, replicas)
        return reason and f"no replica serves the champion {record.champion}: {reason}"[:_TROUBLE_LENGTH_MAX]
    if record.candidate is not None:
        reason = probe.unserved_reason(record.candidate, replicas) or "its trial is under way"
        return f"no version serves yet, the candidate is {record.candidate}: {reason}"[:_TROUBLE_LENGTH_MAX]
    newest = await store.newest_versions(tx, record.model, 1)
    decisions = await store.decisions(tx, [version.version for version in newest])
    if not decisions:
        return None
    last = decisions[-1]
    return f"no version serves, {last.version} was {last.decision}: {last.reason or 'no reason'}"[:_TROUBLE_LENGTH_MAX]


async def version_states(tx: AsyncConnection, versions: Sequence[VersionRecord]) -> tuple[VersionState, ...]:
    """Return the states of versions for the REST interface, with their decisions and tags."""
    names = [version.version for version in versions]
    decided = await store.decisions(tx, names)
    tags = await store.tags(tx, names)
    return tuple(_version(version, decided, tags.get(version.version, ())) for version in versions)


def _version(version: VersionRecord, decided: Sequence[ModelEvent], tags: tuple[str, ...]) -> VersionState:
    return VersionState(
        id=version.version,
        model=version.model,
        lineage=version.lineage,
        step=version.step,
        parent=version.parent,
        base=version.base,
        state=version.state,
        registered_at=version.registered,
        trained=version.trained,
        label=version.label,
        served=version.served,
        retired=version.retired,
        collected=version.collected,
        tags=tags,
        manifest=version.manifest,
        decisions=tuple(event for event in decided if event.version == version.version),
    )


class RegistryChanges:
    """Executes changes that operators request over REST. Only the leader may do this. `changed` is called after each
    change."""

    def __init__(self, processor: Processor, lease: LeaderLease, changed: Callable[[], None]) -> None:
        self._processor = processor
        self._lease = lease
        self._changed = changed

    async def make(self, name: str, action: audit.AuditedAction, work: Work) -> ModelState:
        """Execute `work` on the model `name` in one transaction, publish its events, and return the state of the model.

        Raises:
            Refused: the change is not allowed, this registry is a standby, or the bus or the database is unavailable.
        """
        self.require_leadership()
        model_states: list[ModelState] = []
        refusals: list[Refused] = []

        async def step(tx: AsyncConnection, now: datetime) -> Sequence[Event]:
            model_states.clear()
            refusals.clear()
            await self._lease.check(tx)
            try:
                async with tx.begin_nested():
                    transition = Transition(tx, now, action.requester.who or None)
                    detail = await work(tx, now, transition)
                    events = await transition.finish()
                    audited_action = audit.AuditedAction(
                        action.requester, action.action, action.version, action.why, detail or action.detail
                    )
                    await audit.add_entry(tx, now, name, audited_action)
                    model_states.append(await model_state(tx, await store.require_model(tx, name)))
            except Refused as error:
                refusals.append(error)
                return ()
            return events

        try:
            await self._processor.step(step)
        except LostLeadership:
            raise _standby() from None
        except Unavailable as error:
            raise Refused(503, "unavailable", f"the change was not made, or it is not published yet: {error}") from None
        if refusals:
            raise refusals[0]
        self._changed()
        return model_states[0]

    def require_leadership(self) -> None:
        """Check that this registry is the leader. Raises `Refused` 503."""
        if not self._lease.acquired.is_set():
            raise _standby()


def _standby() -> Refused:
    return Refused(503, "not_leader", "this registry is a standby; send the request to the leader")
