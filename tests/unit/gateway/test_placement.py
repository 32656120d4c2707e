"""Tests of the version and the replica of a call: sticky sessions, withdrawn versions and failed replicas."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from datetime import timedelta

import pytest

from headrace_gateway.requests.chat_call import ChatCall, canonical_request, core_of
from headrace_gateway.requests.chat_request import ChatRequest
from headrace_gateway.requests.identity import CallIdentity
from headrace_gateway.routing.model_catalog import ModelCatalog
from headrace_gateway.routing.placement import Pin, Placement, StickyVersions
from headrace_gateway.routing.replica_set import ReplicaSet
from headrace_gateway.settings import StickySettings
from headrace_schemas import LoadedVersion, Replica, Sampling
from headrace_schemas.events.routing import LoadState
from headrace_schemas.events.turn import SessionSource
from headrace_schemas.values import ids
from tests.support.gateway import routing
from tests.support.streams import ManualClock

V1, V2 = (f"tiny@{digit * 16}" for digit in "12")


class Rig:
    """A placement over two or more replicas, with a clock that the test advances."""

    def __init__(self, **replicas: tuple[str, ...]) -> None:
        self.clock = ManualClock()
        self.history_read = True
        self.replica_set = ReplicaSet(self.clock, lambda: self.history_read)
        self.catalog = ModelCatalog({}, lambda: True, self.replica_set.changed)
        self.sticky_versions = StickyVersions(StickySettings(idle_s=60), self.clock)
        self.placement = Placement(self.catalog, self.sticky_versions, self.replica_set)
        for replica_id, versions in replicas.items():
            self.beat(replica_id, *versions)

    def beat(self, replica_id: str, *versions: str, **changes: object) -> None:
        replica = Replica(
            time=self.clock.now(),
            replica_id=replica_id,
            url="http://x",
            engine="torch",
            resumes=True,
            versions=tuple(LoadedVersion(version=version, state="ready") for version in versions),
            capacity=4,
            ttl_s=5,
            started_at=self.clock.now(),
        )
        self.replica_set.update(replica_id, replica.model_copy(update=changes))

    def route(self, champion: str, revision: int, *, serve: tuple[str, ...] = (V1, V2), **changes: object) -> None:
        self.catalog.update("tiny", routing(champion, serve, revision, **changes))

    def place(self, session: str = "run-1", model: str = "tiny", source: SessionSource = "header") -> tuple[str, str]:
        assigned = self.placement.assign(self.call(session, model, source))
        assert assigned is not None
        return assigned.version, assigned.member.replica.replica_id

    def call(self, session: str = "run-1", model: str = "tiny", source: SessionSource = "header") -> ChatCall:
        body = {"model": model, "messages": [{"role": "user", "content": "x"}]}
        request = ChatRequest.model_validate_json(json.dumps(body))
        messages = tuple(message.event for message in request.messages)
        key = ids.session_key("default", session)
        return ChatCall(
            request=request,
            messages=messages,
            sampling=Sampling(),
            identity=CallIdentity("default", session, key, source, None, None, "train"),
            target=self.catalog.resolve(model),
            response_id=ids.response_id(key),
            digest="0" * 64,
            retry=0,
            started_at=self.clock.now(),
            core=core_of(canonical_request(request, messages, Sampling()), request),
        )


def test_a_session_keeps_its_version_until_it_is_idle() -> None:
    rig = Rig(a=(V1, V2))
    rig.route(V1, 1)
    assert rig.place()[0] == V1
    rig.route(V2, 2)
    rig.clock.advance(59)
    assert rig.place()[0] == V1
    assert rig.place("run-2")[0] == V2
    rig.clock.advance(60)
    assert rig.place()[0] == V2


def test_a_withdrawn_version_is_left_at_once() -> None:
    rig = Rig(a=(V1, V2))
    rig.route(V1, 1)
    rig.place()
    rig.route(V2, 2, withdrawn=(V1,))
    assert rig.place()[0] == V2


def test_a_pinned_version_that_nobody_holds_any_more_gives_way() -> None:
    rig = Rig(a=(V1, V2))
    rig.route(V1, 1)
    rig.place()
    rig.route(V2, 2)
    rig.beat("a", V2)
    assert rig.place()[0] == V2


def test_a_new_run_of_an_implied_session_gets_the_current_version() -> None:
    """Runs that repeat one prompt share a session key, which must not keep an old version in use for ever."""
    rig = Rig(a=(V1, V2))
    rig.route(V1, 1)
    assert rig.place(source="implicit")[0] == V1
    rig.route(V2, 2)
    assert rig.place(source="implicit")[0] == V2


def test_an_exact_version_is_neither_pinned_nor_replaced() -> None:
    rig = Rig(a=(V1, V2))
    rig.route(V2, 1)
    assert rig.place(model=V1)[0] == V1
    assert rig.place()[0] == V2
    assert rig.place(model=V1)[0] == V1


def test_an_ended_session_starts_anew() -> None:
    rig = Rig(a=(V1, V2))
    rig.route(V1, 1)
    rig.place()
    rig.route(V2, 2)
    rig.sticky_versions.drop("default", ids.session_key("default", "run-1"))
    assert rig.place()[0] == V2


def test_the_number_of_pins_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_gateway.routing.placement._SESSIONS_MAX", 100)
    rig = Rig(a=(V1,))
    rig.route(V1, 1)
    for number in range(150):
        rig.place(f"run-{number}")
    assert len(rig.sticky_versions) == 100


def test_sessions_of_a_tenant_unpin_none_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_gateway.routing.placement._SESSIONS_MAX", 100)
    rig = Rig(a=(V1,))
    rig.route(V1, 1)
    rig.place("modest")
    for number in range(150):
        rig.sticky_versions.set("greedy", f"key-{number}", "tiny", Pin(V1))
    pin = rig.sticky_versions.get("default", ids.session_key("default", "modest"), "tiny")
    assert pin == Pin(V1)
    assert len(rig.sticky_versions) == 100


def test_sessions_spread_and_stay_where_their_cache_is() -> None:
    rig = Rig(a=(V1,), b=(V1,), c=(V1,))
    rig.route(V1, 1)
    before = {number: rig.place(f"run-{number}")[1] for number in range(90)}
    spread = Counter(before.values())
    assert set(spread) == {"a", "b", "c"}
    assert min(spread.values()) > 10
    rig.beat("b", V1, stopping=True)
    after = {number: rig.place(f"run-{number}")[1] for number in range(90)}
    assert all(after[n] == before[n] for n in before if before[n] != "b"), "only the sessions of b may move"
    assert "b" not in after.values()


def test_a_full_replica_passes_calls_to_the_least_loaded() -> None:
    rig = Rig(a=(V1,), b=(V1,))
    rig.route(V1, 1)
    _, first = rig.place()
    rig.beat(first, V1, in_flight=4)
    assert rig.place()[1] != first


def test_a_silent_replica_is_asked_only_when_no_other_is_left() -> None:
    """If all replicas are silent, the bus may have failed, so the gateway still uses them."""
    rig = Rig(a=(V1,), b=(V1,))
    rig.route(V1, 1)
    rig.clock.advance(6)
    assert rig.placement.assign(rig.call()) is not None
    rig.beat("b", V1)
    assert {rig.place(f"run-{number}")[1] for number in range(20)} == {"b"}


def test_old_heartbeats_read_at_the_start_do_not_look_fresh() -> None:
    rig = Rig()
    rig.route(V1, 1)
    rig.history_read = False
    rig.beat("old", V1, time=rig.clock.now() - timedelta(seconds=60))
    rig.history_read = True
    rig.beat("new", V1, time=rig.clock.now() - timedelta(seconds=60))  # heard just now, from a clock that is behind
    assert {rig.place(f"run-{number}")[1] for number in range(20)} == {"new"}


def test_a_failing_replica_is_left_alone_for_longer_each_time_until_it_is_heard() -> None:
    rig = Rig(a=(V1,))
    rig.route(V1, 1)
    member = rig.replica_set.pick(V1, "s")
    assert member
    pauses = []
    for _ in range(8):
        rig.replica_set.note_failure(member)
        rig.replica_set.note_failure(member)  # a second call that was under way: the same failure
        pauses.append(member.shunned_until_s - rig.clock.monotonic_s())
        assert rig.replica_set.pick(V1, "s") is None
        rig.clock.advance(pauses[-1] + 0.001)
    assert pauses == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0])
    rig.replica_set.note_failure(member)
    rig.beat("a", V1)
    assert rig.replica_set.pick(V1, "s") is member


def test_a_version_that_was_announced_and_is_not_there_is_not_asked_for_again() -> None:
    rig = Rig(a=(V1, V2))
    rig.route(V1, 1)
    member = rig.replica_set.pick(V1, "s")
    assert member
    rig.replica_set.note_missing_version(member, V1)
    assert rig.replica_set.pick(V1, "s") is None
    assert rig.replica_set.pick(V2, "s") is member
    rig.beat("a", V1, V2)
    assert rig.replica_set.pick(V1, "s") is member


def test_only_an_engine_that_can_takes_over_a_stream() -> None:
    rig = Rig(a=(V1,))
    rig.beat("a", V1, engine="vllm", resumes=False)
    rig.route(V1, 1)
    assert not rig.placement.may_resume(rig.call(), V1)
    assert rig.replica_set.pick(V1, "s", resuming=True) is None
    rig.beat("b", V1)
    assert rig.placement.may_resume(rig.call(), V1)
    member = rig.replica_set.pick(V1, "s", resuming=True)
    assert member
    assert member.replica.replica_id == "b"


def loaded(version: str, state: LoadState) -> tuple[LoadedVersion, ...]:
    return (LoadedVersion(version=version, state=state),)


def test_what_drains_takes_over_what_was_begun_and_nothing_new() -> None:
    """Routing dropped the version while a stream was open, and all replicas drain the version."""
    rig = Rig()
    rig.route(V2, 1, serve=(V2,))
    rig.beat("a", versions=loaded(V1, "draining"))
    assert rig.replica_set.pick(V1, "s") is None
    assert rig.placement.may_resume(rig.call(), V1)
    for with_tokens in (False, True):
        assert rig.placement.resume(rig.call(), V1, frozenset(), with_tokens=with_tokens) is not None
    rig.beat("a", versions=loaded(V1, "draining"), stopping=True)
    assert rig.placement.resume(rig.call(), V1, frozenset(), with_tokens=True) is None
    assert not rig.placement.may_resume(rig.call(), V1)


@pytest.mark.parametrize(("state", "hope"), [("ready", True), ("draining", True), ("loading", True), ("failed", False)])
def test_a_broken_stream_waits_for_who_has_its_version_or_loads_it(state: LoadState, hope: bool) -> None:
    rig = Rig()
    rig.route(V2, 1, serve=(V2,))
    rig.beat("a", versions=loaded(V1, state))
    assert rig.placement.may_resume(rig.call(), V1) is hope


def test_a_broken_stream_waits_while_routing_wants_its_version() -> None:
    """A replica that has just restarted reports no version until it has read the routing."""
    rig = Rig(a=())
    rig.route(V2, 1, serve=(V1, V2))
    assert rig.placement.may_resume(rig.call(), V1)
    rig.beat("a", V1)
    member = rig.replica_set.pick(V1, "s")
    assert member
    rig.replica_set.note_missing_version(member, V1)
    assert rig.placement.may_resume(rig.call(), V1), "it may get it again"
    rig.route(V2, 2, serve=(V2,))
    assert not rig.placement.may_resume(rig.call(), V1)


async def test_waiting_ends_with_news_and_with_the_pause_of_a_shunned_replica() -> None:
    rig = Rig(a=(V1,))
    member = rig.replica_set.pick(V1, "s")
    assert member
    rig.replica_set.note_failure(member)
    started = time.monotonic()
    await rig.replica_set.wait(60)  # 0.05 s: the pause
    assert time.monotonic() - started < 5
    rig.clock.advance(1)
    waiting = asyncio.create_task(rig.replica_set.wait(60))
    await asyncio.sleep(0)
    rig.route(V1, 1)
    await asyncio.wait_for(waiting, 5)
