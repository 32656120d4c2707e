"""Tests of clients of the registry: `ModelManager`, `Listener`, blobs and rollouts.

`ModelManager` names versions and leaves all decisions to the registry. `Listener` reads decisions from a real bus.
Blobs are downloaded from a blob store and verified against their digest.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import httpx2
import pytest

from headrace import ApiError, ModelManager
from headrace.errors import HeadraceError, UsageError
from headrace.following import Listener, describe_decision
from headrace.registry import ModelRegistry
from headrace.rollouts import ABTestFramework, HotUpdater
from headrace.topics import event_of, fetch
from headrace_runtime.kafka import topics
from headrace_runtime.settings.sections import BusSettings
from headrace_schemas import ModelEvent
from headrace_schemas.http.registry_api import ModelState, RolloutList, RolloutState, VersionList, VersionState
from headrace_schemas.values.blobs import BlobRef
from tests.support.processes import wait_until
from tests.support.servers import BrokerProcess
from tests.support.service_process import bus_view
from tests.support.turns import experience

OLD, NEW = "m@0000000000000000", "m@1111111111111111"


def manager(answer: Callable[[httpx2.Request], httpx2.Response]) -> ModelManager:
    return ModelManager("m", ModelRegistry("http://registry", transport=httpx2.MockTransport(answer)))


class Registry:
    """Registry that returns the real registry's responses and records requests."""

    def __init__(self, champion: str | None = OLD) -> None:
        self.champion = champion
        self.posted: list[tuple[str, dict[str, object]]] = []
        self.refuse: str | None = None

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        if request.method == "POST":
            self.posted.append((request.url.path, json.loads(request.content)))
            if self.refuse:
                return httpx2.Response(409, json={"error": {"message": self.refuse, "code": "alias_moved"}})
        if request.url.path.endswith("/versions"):
            fields = {"model": "m", "lineage": "main", "step": 0, "registered_at": datetime.now(UTC).isoformat()}
            data = [
                {"id": NEW, "state": "promoted", **fields},
                {"id": OLD, "state": "promoted", "label": "v0", **fields},
            ]
            return httpx2.Response(200, json={"data": data})
        state = {"id": "m", "revision": 1, "champion": self.champion, "aliases": {"v1.0": OLD}}
        return httpx2.Response(200, json={name: value for name, value in state.items() if value is not None})


def test_the_champion_gets_a_name() -> None:
    registry = Registry()
    assert manager(registry).create_version("v1.1", why="after Tuesday") == OLD
    moves = {"v1.1": {"version": OLD, "expected": None}}
    assert registry.posted == [("/v1/models/m/aliases", {"moves": moves, "why": "after Tuesday"})]


def test_name_of_another_version_is_refused_by_the_registry() -> None:
    registry = Registry()
    registry.refuse = "alias v1.1 of m names something else now"
    with pytest.raises(ApiError, match="names something else"):
        manager(registry).create_version("v1.1", NEW)


def test_naming_the_champion_without_a_champion_is_refused() -> None:
    with pytest.raises(UsageError, match="no champion to name v1"):
        manager(Registry(champion=None)).create_version("v1")


def test_rollback_promotes_the_named_version() -> None:
    registry = Registry()
    manager(registry).rollback("v1.0")
    assert registry.posted == [("/v1/models/m/promote", {"version": OLD, "force": True})]
    assert manager(registry).version("v0") == manager(registry).version(OLD) == OLD
    with pytest.raises(UsageError, match="no version 'v9'"):
        manager(registry).rollback("v9")


def test_ab_test_begins_a_rollout_against_the_champion() -> None:
    registry = Registry()
    manager(registry).create_ab_test("v1.0", NEW, "3/10")
    ((path, body),) = registry.posted
    assert path == "/v1/models/m/rollouts"
    assert (body["version"], body["kind"], body["share"]) == (NEW, "ab", "3/10")
    with pytest.raises(UsageError, match="is not the champion"):
        manager(registry).create_ab_test(NEW, "v1.0")


LATER, EARLIER = "m@0fffffffffff", "m@0123456789ab"


def event(decision: str, reason: str | None = None, number: int = 0, **statistics: float) -> ModelEvent:
    fields = {"time": datetime(2026, 1, 1, tzinfo=UTC), "decision_id": f"{decision}-{number}", "model": "m"}
    return ModelEvent.model_validate(
        {
            **fields,
            "version": LATER,
            "previous": EARLIER,
            "decision": decision,
            "reason": reason,
            "statistics": statistics,
        }
    )


@pytest.mark.parametrize(
    ("decided", "expected"),
    [
        (
            event("evaluated", score=0.75, tasks=20, score_standard_error=0.1),
            f"{LATER} is measured: score 0.750 ± 0.100 on 20 audit tasks",
        ),
        (event("evaluated", score=0.5, tasks=3), f"{LATER} is measured: score 0.500 on 3 audit tasks"),
        (
            event("rejected", "inferior", difference=-0.25, standard_error=0.1, tasks=20),
            f"{LATER} is refused: inferior (-0.250 ± 0.100 on 20 gate tasks)",
        ),
        (event("promoted", "not inferior"), f"{LATER} takes over from {EARLIER}: not inferior"),
        (event("rejected", "inferior"), f"{LATER} is refused: inferior"),
        (event("rolled_back", "complaints"), f"{LATER} is taken back, {EARLIER} serves again: complaints"),
        (event("withdrawn"), f"{LATER} is withdrawn"),
        (event("registered"), None),
        (event("probed"), None),
    ],
)
def test_line_formats_a_decision(decided: ModelEvent, expected: str | None) -> None:
    assert describe_decision(decided) == expected


@pytest.mark.long
def test_listener_delivers_new_decisions_once_across_an_outage(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path / "broker")
    broker.start()
    decision_ids: list[str] = []

    async def publish(*events: ModelEvent) -> None:
        async with bus_view(broker.address, tmp_path) as view:
            for decision in events:
                await view.producer.send(decision)

    listener = Listener(broker.address, lambda decided: decision_ids.append(decided.decision_id))
    try:
        asyncio.run(topics.ensure(BusSettings(address=broker.address)))
        asyncio.run(publish(event("promoted", number=0)))
        listener.start()
        wait_until(lambda: listener._next_offsets is not None, 30, "the listener knows the end offsets")
        asyncio.run(publish(event("promoted", number=1), event("rejected", number=2)))
        wait_until(lambda: len(decision_ids) == 2, 30, "two decisions")
        broker.kill()
        broker.start()
        asyncio.run(publish(event("promoted", number=3)))
        wait_until(lambda: len(decision_ids) == 3, 60, "the one after the outage")
        assert decision_ids == ["promoted-1", "rejected-2", "promoted-3"]
    finally:
        listener.stop()
        broker.stop()


def test_listener_stops_while_the_bus_is_unreachable() -> None:
    listener = Listener("127.0.0.1:1", lambda _decided: None)
    listener.start()
    listener.stop()


def stored(path: Path, data: bytes) -> BlobRef:
    digest = hashlib.sha256(data).hexdigest()
    path.mkdir()
    (path / digest).write_bytes(data)
    return BlobRef(uri=(path / digest).as_uri(), sha256=digest, size=len(data))


async def test_event_is_read_from_the_blob_store(tmp_path: Path) -> None:
    event = experience("E", "a")
    ref = stored(tmp_path / "blob", event.to_json())
    read = await event_of("experiences", ref.model_dump_json().encode(), [("ce_dataref", ref.uri.encode())])
    assert read == event


def test_blob_with_another_digest_is_refused(tmp_path: Path) -> None:
    ref = stored(tmp_path / "blob", b"data")
    (tmp_path / "blob" / ref.sha256).write_bytes(b"date")
    with pytest.raises(HeadraceError, match=r"blob file://.* its content does not match the digest in its name"):
        fetch(ref)


@pytest.mark.parametrize(
    "uri",
    [
        "http://127.0.0.1:{port}/{digest}", "https://evil.example/{digest}", "ftp://evil.example/{digest}",
        "simplecache::http://127.0.0.1:{port}/{digest}", "file:///etc/passwd", "filecache::file:///x/{digest}",
        "HTTP://127.0.0.1:{port}/{digest}", "webhdfs://evil.example/{digest}", "s3://bucket/other",
    ],
)  # fmt: skip
def test_a_record_cannot_name_another_server_or_file(uri: str) -> None:
    digest = hashlib.sha256(b"data").hexdigest()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        ref = BlobRef(uri=uri.format(port=server.getsockname()[1], digest=digest), sha256=digest, size=4)
        with pytest.raises(HeadraceError, match="is not in a blob store"):
            fetch(ref)
        with pytest.raises(TimeoutError):
            server.accept()


CHAMPION, CANARY = (f"m@{digit * 16}" for digit in "12")
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def version(name: str, state: str) -> VersionState:
    return VersionState.model_validate(
        {"id": name, "model": "m", "lineage": "main", "step": 1, "state": state, "registered_at": NOW}
    )


def rollout(phase: str, *, good: bool = False) -> RolloutState:
    fields = {
        "id": "r1",
        "model": "m",
        "version": CANARY,
        "control": CHAMPION,
        "kind": "ab",
        "phase": phase,
        "stage": 0,
        "stages": ("1/20",),
        "share": "1/20",
        "unit": "session",
        "number": 1,
        "reason": "so",
        "good_enough": good,
        "margins": {"reward": 0.1},
        "higher_is_better": {"reward": True},
        "statistics": {"success.difference": 0.2, "success.lower": 0.1, "success.upper": 0.3},
        "began_at": NOW,
        "changed_at": NOW,
        "watched_s": 1.0,
    }
    return RolloutState.model_validate(fields)


class FakeRegistry:
    """Registry of one model. `ended` is the final state of its rollout."""

    def __init__(self, ended: RolloutState, state: str = "registered") -> None:
        self.ended = ended
        self.state = state
        self.requests: list[tuple[str, dict[str, object]]] = []
        self.begun = False
        self.gets_there = True

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        path = request.url.path
        if request.method == "POST":
            self.requests.append((path, json.loads(request.content or b"{}")))
            self.begun = self.begun or (self.gets_there and path.endswith("/rollouts"))
        if path == "/v1/rollouts":
            rollouts = (self.ended,) if self.begun else ()
            return httpx2.Response(200, content=RolloutList(data=rollouts).model_dump_json())
        if path.startswith("/v1/rollouts/"):
            return httpx2.Response(200, content=self.ended.model_dump_json())
        if path.endswith("/versions"):
            listed = (version(CANARY, self.state), version(CHAMPION, "promoted"))
            return httpx2.Response(200, content=VersionList(data=listed).model_dump_json())
        return httpx2.Response(200, content=ModelState(id="m", champion=CHAMPION, revision=1).model_dump_json())


@pytest.fixture
def registry() -> Iterator[Callable[[FakeRegistry], ModelRegistry]]:
    opened: list[ModelRegistry] = []

    def open_at(desk: FakeRegistry) -> ModelRegistry:
        opened.append(ModelRegistry("http://registry", transport=httpx2.MockTransport(desk)))
        return opened[-1]

    yield open_at
    for client in opened:
        client.close()


Open = Callable[[FakeRegistry], ModelRegistry]


def test_a_canary_that_was_good_enough_serves_everybody(registry: Open) -> None:
    desk = FakeRegistry(rollout("hold", good=True))
    updater = HotUpdater("m", registry(desk), canary_ratio="1/20")
    assert updater.has_new_model()
    assert updater.test_canary()
    updater.rollout_update()
    assert [path for path, _ in desk.requests] == ["/v1/models/m/rollouts", "/v1/models/m/promote"]
    assert desk.requests[0][1] == {"version": CANARY, "kind": "ab", "share": "1/20", "reason": ""}
    assert desk.requests[1][1] == {"version": CANARY, "force": True}


def test_failed_canary_cannot_be_rolled_out(registry: Open) -> None:
    updater = HotUpdater("m", registry(FakeRegistry(rollout("rolled_back"))))
    assert not updater.test_canary()
    with pytest.raises(UsageError, match="no canary of m has passed"):
        updater.rollout_update()


def test_rolling_update_begins_a_rolling_rollout(registry: Open) -> None:
    desk = FakeRegistry(rollout("hold"))
    HotUpdater("m", registry(desk)).rollout_update(rolling=True)
    assert desk.requests == [
        ("/v1/models/m/rollouts", {"version": CANARY, "kind": "rolling", "share": None, "reason": ""})
    ]


def test_has_new_model_waits_for_check_after_updates(registry: Open) -> None:
    assert not HotUpdater("m", registry(FakeRegistry(rollout("hold"))), check_after_updates=2).has_new_model()
    assert not HotUpdater("m", registry(FakeRegistry(rollout("hold"), "rejected"))).has_new_model()


def test_version_without_traffic_raises_the_reason(registry: Open) -> None:
    desk = FakeRegistry(rollout("hold"), "rejected")
    desk.gets_there = False
    with pytest.raises(UsageError, match="rejected"):
        HotUpdater("m", registry(desk)).test_canary(CANARY)


@pytest.mark.parametrize(
    ("phase", "good", "winner"), [("hold", True, CANARY), ("hold", False, None), ("rolled_back", False, CHAMPION)]
)
def test_an_ab_test_names_its_winner(registry: Open, phase: str, good: bool, winner: str | None) -> None:
    result = ABTestFramework("m", registry(FakeRegistry(rollout(phase, good=good)))).run(CANARY, share="1/2")
    assert result.winner == winner
    assert result.metrics == {"accuracy": (0.2, 0.1, 0.3)}


def test_traffic_is_switched_past_the_gate(registry: Open) -> None:
    desk = FakeRegistry(rollout("hold"))
    ABTestFramework("m", registry(desk)).switch_traffic(CANARY)
    assert desk.requests == [("/v1/models/m/promote", {"version": CANARY, "force": True})]
