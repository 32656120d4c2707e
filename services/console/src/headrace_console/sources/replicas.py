"""Versions that replicas serve now, and logprobs of captured answers under these versions, cached for an hour."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

from pydantic import ValidationError

from headrace_console.sources.clients import bearer, call
from headrace_runtime.clock import Clock
from headrace_runtime.errors import InvalidEvent, Refused
from headrace_runtime.http.guard import ReplicaTrust
from headrace_runtime.kafka.consumer import TopicTable
from headrace_runtime.kafka.wire import Record
from headrace_runtime.settings.sections import Common
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import Replica
from headrace_schemas.http.replica_api import ScoredAnswers, ScoreRequest, TokensToScore

TOKENS_MAX = 32_768
"""Largest number of prompt and answer tokens of one request."""
_CACHE_S = 3600.0
_CACHED_MAX = 16
_TIMEOUT_S = 120.0
Answer = tuple[str, str, int, str]
"""Key of cached logprobs: tenant, turn id, choice and version."""


class ReplicaReader:
    """Table of the replicas that are alive, and client of those that compute logprobs of given tokens
    (`Replica.scores`).
    """

    def __init__(self, common: Common, blobs: BlobStore, clock: Clock) -> None:
        key = common.security.internal_key.get_secret_value()
        self._headers = {"content-type": "application/json"} | bearer(key)
        self._clock = clock
        self._seen_at_s: dict[str, float] = {}
        accepts = ReplicaTrust(common.security).accepts
        client_id = "headrace-console-replicas"
        self.table = TopicTable(Replica, common.bus, client_id, blobs, _skip, self._note, accepts)
        self._lock = asyncio.Lock()
        self._cache: OrderedDict[Answer, tuple[float, Sequence[float]]] = OrderedDict()

    def versions(self, model: str) -> list[str]:
        """Return the versions of a model whose logprobs a replica computes now."""
        return _versions(model, [replica for replica in self._live() if replica.scores])

    def served_versions(self, model: str) -> list[str]:
        """Return the versions of a model that a replica serves now."""
        return _versions(model, self._live())

    def cached_logprobs(self, answer: Answer) -> Sequence[float]:
        """Return the logprobs of an answer that were computed within the last hour, or an empty sequence."""
        entry = self._cache.get(answer)
        if entry is None or self._clock.monotonic_s() - entry[0] >= _CACHE_S:
            self._cache.pop(answer, None)
            return ()
        return entry[1]

    async def compute(self, answer: Answer, tokens: TokensToScore) -> None:
        """Request the logprobs of an answer's tokens from a replica, and cache them for an hour.

        Raises:
            Refused: no replica serves the version (409), another request is in progress (429), the answer is too long
                (413), or the replica refuses the request.
        """
        version = answer[3]
        if len(tokens.prompt_token_ids) + len(tokens.token_ids) > TOKENS_MAX:
            raise Refused(413, "too_long", f"Prompt and answer have more than {TOKENS_MAX:,} tokens.")
        if self._lock.locked():
            raise Refused(429, "busy", "Another request for probabilities is in progress. Try again in a moment.")
        async with self._lock:
            replicas = [replica for replica in self._live() if replica.scores and replica.ready(version)]
            if not replicas:
                raise Refused(409, "not_served", f"{version} is not served now by a replica that computes logprobs.")
            replica = min(replicas, key=lambda each: each.in_flight / each.capacity)
            body = ScoreRequest(model=version, answers=(tokens,)).model_dump_json().encode()
            url = f"{replica.url}/v1/logprobs"
            content = await call("replica", "POST", url, self._headers, body, timeout_s=_TIMEOUT_S)
            self._store(answer, _logprobs_of(content, len(tokens.token_ids)))

    def _live(self) -> list[Replica]:
        """Return the replicas whose last heartbeat arrived within its `ttl_s`."""
        now_s = self._clock.monotonic_s()
        return [
            replica
            for key, replica in self.table.rows.items()
            if not replica.stopping and now_s - self._seen_at_s.get(key, now_s) <= replica.ttl_s
        ]

    def _note(self, key: str, replica: Replica | None) -> None:
        if replica is None:
            self._seen_at_s.pop(key, None)
        else:
            self._seen_at_s[key] = self._clock.monotonic_s()

    def _store(self, answer: Answer, logprobs: Sequence[float]) -> None:
        self._cache[answer] = (self._clock.monotonic_s(), logprobs)
        self._cache.move_to_end(answer)
        if len(self._cache) > _CACHED_MAX:
            self._cache.popitem(last=False)


def _versions(model: str, replicas: Sequence[Replica]) -> list[str]:
    """Return the versions of a model that at least one of the replicas has loaded."""
    names = {
        loaded.version
        for replica in replicas
        for loaded in replica.versions
        if replica.ready(loaded.version) and loaded.version.partition("@")[0] == model
    }
    return sorted(names)


def _logprobs_of(content: bytes, tokens: int) -> Sequence[float]:
    """Return the logprobs of the only answer in a replica's response. Raises `Refused` 502 if their number is not
    `tokens`.
    """
    try:
        (logprobs,) = ScoredAnswers.model_validate_json(content).logprobs
    except (ValidationError, ValueError):
        raise Refused(502, "replica_answer", "The replica's answer has no logprobs.") from None
    if len(logprobs) != tokens:
        raise Refused(502, "replica_answer", f"The replica returned {len(logprobs)} logprobs for {tokens} tokens.")
    return tuple(logprobs)


async def _skip(_record: Record, _error: InvalidEvent) -> None:
    """Ignore a heartbeat that cannot be decoded: the registry dead-letters it."""
