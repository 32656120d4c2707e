"""Clients of rollouts, against a registry that answers as the real one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

import httpx2
import pytest

from headrace.errors import UsageError
from headrace.registry import ModelRegistry
from headrace.rollouts import ABTestFramework, HotUpdater
from headrace_schemas.http.registry_api import ModelState, VersionList, VersionState
from headrace_schemas.http.rollout_api import RolloutList, RolloutState

OLD, NEW = (f"m@{digit * 16}" for digit in "12")
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def version(name: str, state: str) -> VersionState:
    return VersionState.model_validate(
        {"id": name, "model": "m", "lineage": "main", "step": 1, "state": state, "registered_at": NOW}
    )


def rollout(phase: str, *, good: bool = False) -> RolloutState:
    fields = {
        "id": "r1",
        "model": "m",
        "version": NEW,
        "control": OLD,
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
    """Registry of one model; `ended` is the final state of its rollout."""

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
            listed = (version(NEW, self.state), version(OLD, "promoted"))
            return httpx2.Response(200, content=VersionList(data=listed).model_dump_json())
        return httpx2.Response(200, content=ModelState(id="m", champion=OLD, revision=1).model_dump_json())


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
    assert desk.requests[0][1] == {"version": NEW, "kind": "ab", "share": "1/20", "reason": ""}
    assert desk.requests[1][1] == {"version": NEW, "force": True}


def test_failed_canary_cannot_be_rolled_out(registry: Open) -> None:
    updater = HotUpdater("m", registry(FakeRegistry(rollout("rolled_back"))))
    assert not updater.test_canary()
    with pytest.raises(UsageError, match="no canary of m has passed"):
        updater.rollout_update()


def test_rolling_update_begins_a_rolling_rollout(registry: Open) -> None:
    desk = FakeRegistry(rollout("hold"))
    HotUpdater("m", registry(desk)).rollout_update(rolling=True)
    assert desk.requests == [
        ("/v1/models/m/rollouts", {"version": NEW, "kind": "rolling", "share": None, "reason": ""})
    ]


def test_has_new_model_waits_for_check_after_updates(registry: Open) -> None:
    assert not HotUpdater("m", registry(FakeRegistry(rollout("hold"))), check_after_updates=2).has_new_model()
    assert not HotUpdater("m", registry(FakeRegistry(rollout("hold"), "rejected"))).has_new_model()


def test_version_without_traffic_raises_the_reason(registry: Open) -> None:
    desk = FakeRegistry(rollout("hold"), "rejected")
    desk.gets_there = False
    with pytest.raises(UsageError, match="rejected"):
        HotUpdater("m", registry(desk)).test_canary(NEW)


@pytest.mark.parametrize(
    ("phase", "good", "winner"), [("hold", True, NEW), ("hold", False, None), ("rolled_back", False, OLD)]
)
def test_an_ab_test_names_its_winner(registry: Open, phase: str, good: bool, winner: str | None) -> None:
    result = ABTestFramework("m", registry(FakeRegistry(rollout(phase, good=good)))).run(NEW, share="1/2")
    assert result.winner == winner
    assert result.metrics == {"accuracy": (0.2, 0.1, 0.3)}


def test_traffic_is_switched_past_the_gate(registry: Open) -> None:
    desk = FakeRegistry(rollout("hold"))
    ABTestFramework("m", registry(desk)).switch_traffic(NEW)
    assert desk.requests == [("/v1/models/m/promote", {"version": NEW, "force": True})]
