"""Gets a call served while one replica lives (P8): tries, moves on, waits, and resumes streams that broke.

Nothing that happens among replicas reaches a client unless it lasts longer than `upstream.hold_s`.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator

from pydantic import ValidationError

from headrace_gateway import metrics
from headrace_gateway.call import Call
from headrace_gateway.engine import Engines, ReplicaFailed
from headrace_gateway.engine_wire import EngineAnswer, EngineUsage
from headrace_gateway.fleet import Fleet
from headrace_gateway.lines import Line
from headrace_gateway.placement import Place, Placement
from headrace_gateway.refusals import ApiError, overloaded
from headrace_gateway.settings import UpstreamSettings
from headrace_gateway.transcript import Transcript
from headrace_runtime.clock import Clock
from headrace_runtime.logs import get_logger

log = get_logger(__name__)


class _Patience:
    """How much trouble one call may still have. Progress renews it; time at a replica is not counted."""

    def __init__(self, settings: UpstreamSettings) -> None:
        self._settings = settings
        self.renew()
        self._last = "no replica has the version ready"

    def renew(self) -> None:
        self._waited_s = 0.0
        self._errors = 0
        self.avoid: frozenset[str] = frozenset()
        """Replicas that failed at this very request; asked again only when there is no other."""

    def wait_s(self) -> float:
        """Raises `ApiError` 503 when there is no more waiting."""
        left = self._settings.hold_s - self._waited_s
        if left <= 0:
            raise overloaded(f"no replica could serve this within {self._settings.hold_s:g} s: {self._last}")
        return left

    def waited(self, seconds: float) -> None:
        self._waited_s += seconds

    def failed(self, replica_id: str, failure: ReplicaFailed) -> None:
        """Raises `ApiError` 502 when engines have failed too often at this very request."""
        self._last = failure.trouble
        if failure.trouble in ("error", "hung"):
            self.avoid |= {replica_id}
        if failure.trouble == "error":
            self._errors += 1
        if self._errors >= self._settings.errors_max:
            raise ApiError(502, "engine_error", "the engine failed at this request repeatedly; its log says why")


class Relay:
    """Serves calls from the fleet."""

    def __init__(
        self, engines: Engines, fleet: Fleet, placement: Placement, settings: UpstreamSettings, clock: Clock
    ) -> None:
        self._engines = engines
        self._fleet = fleet
        self._placement = placement
        self._settings = settings
        self._clock = clock

    async def complete(self, call: Call) -> tuple[EngineAnswer, Transcript]:
        """The whole answer. Raises `ApiError` when it cannot be had, or when the engine refuses the request."""
        patience = _Patience(self._settings)
        while True:
            place = await self._find(lambda: self._placement.place(call, patience.avoid), patience)
            try:
                with self._calling(place, lambda: self._placement.choose(call) is not None) as line:
                    answer = await self._engines.complete(place.member.replica, call.body(place.version), line)
            except ReplicaFailed as failure:
                self._note(place, failure, patience)
                continue
            transcript = Transcript(replica_id=place.member.replica.replica_id)
            transcript.add(answer, streamed=False)
            return answer, transcript

    async def stream(self, call: Call, transcript: Transcript) -> AsyncGenerator[EngineAnswer]:
        """Chunks as one uninterrupted stream, each already in `transcript`. Raises as `complete` does, at any point.

        Those that only open the answer are held until a token is there: the replica may still fail, and the one that
        takes its place may sample from another prompt, and with another version.
        """
        patience = _Patience(self._settings)
        opening: list[EngineAnswer] = []
        while True:
            place = await self._find(lambda: self._next_place(call, transcript, patience), patience)
            transcript.replica_id = place.member.replica.replica_id
            try:
                with self._calling(place, lambda: self._can_move(call, transcript)) as line:
                    async with contextlib.aclosing(self._chunks(call, place, transcript, line)) as chunks:
                        async for chunk in chunks:
                            patience.renew()
                            opening.append(chunk)
                            while transcript.begun and opening:
                                yield opening.pop(0)
                if not transcript.finished(call.request.choices):
                    raise ReplicaFailed("connection", "the stream ended before all choices did")
                return
            except ReplicaFailed as failure:
                if transcript.finished(call.request.choices):
                    yield _own_count(transcript)
                    return
                self._note(place, failure, patience)
                if not transcript.begun:
                    opening.clear()
                    transcript.forget()

    def _next_place(self, call: Call, transcript: Transcript, patience: _Patience) -> Place | None:
        if not transcript.begun:
            return self._placement.place(call, patience.avoid)
        if transcript.sampled and not self._fleet.can_resume(transcript.version):
            raise overloaded("the stream broke and no replica can take it over")
        return self._placement.resume(call, transcript.version, patience.avoid, with_tokens=bool(transcript.sampled))

    def _can_move(self, call: Call, transcript: Transcript) -> bool:
        """Whether another replica could go on with this stream now; one that hangs is never picked."""
        if not transcript.begun:
            return self._placement.choose(call) is not None
        place = self._placement.resume(call, transcript.version, frozenset(), with_tokens=bool(transcript.sampled))
        return place is not None

    async def _chunks(
        self, call: Call, place: Place, transcript: Transcript, line: Line
    ) -> AsyncGenerator[EngineAnswer]:
        try:
            resume = transcript.resume()
        except ValidationError as error:
            raise ApiError(502, "engine_error", "the stream broke where tokens and logprobs disagree") from error
        begun = set(transcript.choices)
        if resume:
            metrics.RESUMES.inc()
        chunks = self._engines.stream(place.member.replica, call.body(place.version, resume), line)
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                for choice in chunk.choices:
                    if choice.index in begun:
                        choice.delta.role = None  # the client has had it
                transcript.add(chunk, streamed=True)
                if resume:
                    chunk.prompt_token_ids = None  # and this
                yield chunk

    async def _find(self, find: Callable[[], Place | None], patience: _Patience) -> Place:
        while (place := find()) is None:
            metrics.HOLDS.inc()
            before_s = self._clock.monotonic_s()
            await self._fleet.wait(patience.wait_s())
            patience.waited(self._clock.monotonic_s() - before_s)
        return place

    @contextlib.contextmanager
    def _calling(self, place: Place, elsewhere: Callable[[], bool]) -> Iterator[Line]:
        with self._fleet.calling(place.member, elsewhere) as line:
            yield line
        self._fleet.served(place.member)

    def _note(self, place: Place, failure: ReplicaFailed, patience: _Patience) -> None:
        replica_id = place.member.replica.replica_id
        metrics.UPSTREAM_FAILURES.labels(failure.trouble).inc()
        log.warning("replica_failed", replica=replica_id, trouble=failure.trouble, error=str(failure))
        match failure.trouble:
            case "full":
                self._fleet.full(place.member)
            case "version_missing":
                self._fleet.lacks(place.member, place.version)
            case "connection" | "aborted":
                self._fleet.failed(place.member)
            case "hung":
                patience.waited(self._clock.monotonic_s() - place.member.silent_since_s)
            case "error":
                pass  # the request's doing as likely as the replica's: only this call avoids it
        patience.failed(replica_id, failure)


def _own_count(transcript: Transcript) -> EngineAnswer:
    """The usage that a replica owed when it died after the last token: what it sent is all there was."""
    prompt = len(transcript.prompt_token_ids)
    sampled = sum(len(choice.token_ids) for choice in transcript.choices.values())
    usage = EngineUsage(prompt_tokens=prompt, completion_tokens=sampled, total_tokens=prompt + sampled)
    transcript.usage = transcript.usage or usage
    return EngineAnswer(usage=transcript.usage)
