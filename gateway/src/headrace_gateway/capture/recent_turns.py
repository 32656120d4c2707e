"""Memories of recent calls: requests whose answer may not have reached the client, and whether responses can be
trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headrace_gateway.requests.chat_call import ChatCall
from headrace_runtime.clock import Clock
from headrace_runtime.storage.tenant_memory import TenantMemory
from headrace_schemas import DeadLetter, Feedback, Turn
from headrace_schemas.events.checkpoint import LearnedSignals
from headrace_schemas.events.opinion import Kind
from headrace_schemas.rules.training import no_logprobs_reason, untrained_reason, unused_reason

TURNS_MAX = 65_536
"""Number of responses that are remembered (about 25 MB). Beyond it the tenant with the most responses loses its
oldest."""

SignalsOf = Callable[[str, str], LearnedSignals | None]
"""Function that returns the signals (values, edits, preferences) that the trainer of a model learns from answers of a
version, or None if they are not known."""
_WITHIN_S = 10.0
"""Seconds after an answer within which the same request counts as a possible retry, because a proxy may have cut the
connection unnoticed."""
_REQUESTS_MAX = 16_384
"""Number of requests that are remembered (about 8 MB). Beyond it the tenant with the most requests loses its oldest."""
_Key = tuple[str, str]


def no_signals(_model: str, _version: str) -> LearnedSignals | None:
    """Return None, for a gateway that reads no topics and so knows no trainer's signals."""
    return None


@dataclass(frozen=True, slots=True)
class TrainingEffect:
    """Whether feedback can be trained. If not, `reason` is the reason, in the terms of `headrace status`."""

    teaches: bool
    reason: str | None = None

    def fields(self) -> dict[str, bool | str]:
        """Return the fields `teaches` and, if the feedback cannot be trained, `reason` of the response to feedback."""
        return {"teaches": self.teaches} if self.reason is None else {"teaches": self.teaches, "reason": self.reason}


class _Response(NamedTuple):
    session_key: str
    model: str
    version: str
    untrained: str | None
    no_logprobs: str | None

    @property
    def is_trainable(self) -> bool:
        """Whether each algorithm that learns from rewards can train the response."""
        return self.untrained is None and self.no_logprobs is None


class RecentTurns:
    """Memory of the latest responses of this process and whether they can be trained. Responses of other gateways and
    of earlier processes are unknown to it."""

    def __init__(self, signals_of: SignalsOf = no_signals) -> None:
        self._signals_of = signals_of
        self._responses: TenantMemory[str, _Response] = TenantMemory(TURNS_MAX)
        self._trainable_sessions: TenantMemory[str, bool] = TenantMemory(TURNS_MAX)
        """Sessions with at least one response that each algorithm that learns from rewards can train."""

    def note(self, tenant: str, response_id: str, event: Turn | DeadLetter) -> None:
        """Remember the response that `event` records, and whether it can be trained."""
        if isinstance(event, Turn):
            reasons = untrained_reason(event), no_logprobs_reason(event)
            response = _Response(event.session_key, event.model, event.version, *reasons)
        else:
            response = _Response("", "", "", "dead_letter", None)
        self._responses.set(tenant, response_id, response)
        if response.is_trainable:
            self._trainable_sessions.set(tenant, response.session_key, True)

    def training_effect(self, events: Sequence[Feedback]) -> TrainingEffect | None:
        """Return whether training can use the feedback of one request, and if not, why; None if that is unknown.

        A preference can be used if both of its answers can be trained, other feedback if one of its responses can. The
        result for a session or task is unknown, because later turns may be trainable.

        Args:
            events: the events of the request.
        """
        first = events[0]
        if not first.has_content or not any(event.msg_ids for event in events):
            return None
        names = {name for event in events for name in event.msg_ids}
        if first.preference is not None:
            names = {answer.turn_id for answer in first.preference.pair}
        responses = [self._responses.get(first.tenant, name) for name in sorted(names)]
        outcomes = [
            self._outcome(first.tenant, response, first.feedback_kind) for response in responses if response is not None
        ]
        reasons = [outcome.reason for outcome in outcomes if outcome is not None and outcome.reason is not None]
        teaching_count = sum(outcome is not None and outcome.teaches for outcome in outcomes)
        if first.preference is not None:
            can_teach, cannot_teach = teaching_count == len(names), bool(reasons)
        else:
            can_teach, cannot_teach = teaching_count > 0, len(reasons) == len(names)
        if cannot_teach:
            return TrainingEffect(False, ", ".join(sorted(set(reasons))))
        return TrainingEffect(True) if can_teach else None

    def _outcome(self, tenant: str, response: _Response, kind: Kind) -> TrainingEffect | None:
        """Return whether training can use feedback of one kind (for example a value or an edit) about one response, or
        None if that is unknown."""
        if response.untrained is not None:
            return TrainingEffect(False, response.untrained)
        learns = self._signals_of(response.model, response.version)
        if learns is None:
            return None
        reason = unused_reason(kind, None, response.no_logprobs, learns)
        lacks_logprobs = reason is not None and reason == response.no_logprobs
        if lacks_logprobs and kind == "value" and self._trainable_sessions.get(tenant, response.session_key):
            return None  # a value is one of the whole run, and may train the answers of its other turns
        return TrainingEffect(reason is None, reason)


@dataclass(slots=True)
class _Request:
    turn_id: str
    ended_s: float | None = None
    """Time at which the answer ended, by this process's monotonic clock; None before."""
    is_lost: bool = False
    """Whether the client disconnected before the end of the answer."""


class RepeatedRequests:
    """Memory of the recent requests of each session, by which a client's retry of an unanswered request is
    recognized."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._requests: TenantMemory[_Key, _Request] = TenantMemory(_REQUESTS_MAX)

    def begin(self, call: ChatCall) -> str | None:
        """Remember a request. Return the id of the turn with the same request if its answer may not have reached the
        client, else None."""
        key = self._key(call)
        earlier = self._requests.pop(call.identity.tenant, key)
        self._requests.set(call.identity.tenant, key, _Request(call.response_id))
        if earlier is None:
            return None
        is_recent = earlier.ended_s is not None and self._clock.monotonic_s() - earlier.ended_s <= _WITHIN_S
        return earlier.turn_id if earlier.is_lost or is_recent else None

    def disconnected(self, call: ChatCall) -> None:
        """Remember that the client disconnected before the end of the answer, so that an equal request counts as a
        retry."""
        request = self._find(call)
        if request is not None:
            request.is_lost = True

    def end(self, call: ChatCall) -> None:
        """Remember the time at which the answer ended."""
        request = self._find(call)
        if request is not None:
            request.ended_s = self._clock.monotonic_s()

    def _find(self, call: ChatCall) -> _Request | None:
        request = self._requests.get(call.identity.tenant, self._key(call))
        return request if request is not None and request.turn_id == call.response_id else None

    @staticmethod
    def _key(call: ChatCall) -> _Key:
        return call.identity.session_key, call.digest
