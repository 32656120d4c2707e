"""The thin clients of rollouts, against a registry that answers what a real one would."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

import httpx2
import pytest

from headrace.errors import UsageError
from headrace.registry import ModelRegistry
from headrace.rollouts import ABTestFramework, HotUpdater
from headrace_schemas.registry_api import ModelState, VersionList, VersionState
from headrace_schemas.rollout_api import RolloutList, RolloutState

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


class Desk:
    """A registry of one model; `ended` is what its rollout comes to."""

    def __init__(self, ended: RolloutState, state: str = "registered") -> None:
        self.ended = ended
        self.state = state
        self.asked: list[tuple[str, dict[str, object]]] = []
        self.begun = False
        self.gets_there = True

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        path = request.url.path
        if request.method == "POST":
            self.asked.append((path, json.loads(request.content or b"{}")))
            self.begun = self.begun or (self.gets_there and path.endswith("/rollouts"))
        if path == "/v1/rollouts":
            found = (self.ended,) if self.begun else ()
            return httpx2.Response(200, content=RolloutList(data=found).model_dump_json())
        if path.startswith("/v1/rollouts/"):
            return httpx2.Response(200, content=self.ended.model_dump_json())
        if path.endswith("/versions"):
            listed = (version(NEW, self.state), version(OLD, "promoted"))
            return httpx2.Response(200, content=VersionList(data=listed).model_dump_json())
        return httpx2.Response(200, content=ModelState(id="m", champion=OLD, revision=1).model_dump_json())


@pytest.fixture
def registry() -> Iterator[Callable[[Desk], ModelRegistry]]:
    opened: list[ModelRegistry] = []

    def open_at(desk: Desk) -> ModelRegistry:
        opened.append(ModelRegistry("http://registry", transport=httpx2.MockTransport(desk)))
        return opened[-1]

    yield open_at
    for one in opened:
        one.close()


Open = Callable[[Desk], ModelRegistry]


def test_a_canary_that_was_good_enough_serves_everybody(registry: Open) -> None:
    desk = Desk(rollout("hold", good=True))
    updater = HotUpdater("m", registry(desk), canary_ratio="1/20")
    assert updater.has_new_model()
    assert updater.test_canary()
    updater.rollout_update()
    assert [path for path, _ in desk.asked] == ["/v1/models/m/rollouts", "/v1/models/m/promote"]
    assert desk.asked[0][1] == {"version": NEW, "kind": "ab", "share": "1/20", "reason": ""}
    assert desk.asked[1][1] == {"version": NEW, "force": True}


def test_a_canary_that_was_not_is_no_update(registry: Open) -> None:
    updater = HotUpdater("m", registry(Desk(rollout("rolled_back"))))
    assert not updater.test_canary()
    with pytest.raises(UsageError, match="no canary of m has passed"):
        updater.rollout_update()


def test_a_rolling_update_goes_by_the_gate_alone(registry: Open) -> None:
    desk = Desk(rollout("hold"))
    HotUpdater("m", registry(desk)).rollout_update(rolling=True)
    assert desk.asked == [("/v1/models/m/rollouts", {"version": NEW, "kind": "rolling", "share": None, "reason": ""})]


def test_so_many_updates_are_worth_a_look(registry: Open) -> None:
    assert not HotUpdater("m", registry(Desk(rollout("hold"))), check_after_updates=2).has_new_model()
    assert not HotUpdater("m", registry(Desk(rollout("hold"), "rejected"))).has_new_model()


def test_a_version_that_never_gets_to_traffic_says_why(registry: Open) -> None:
    desk = Desk(rollout("hold"), "rejected")
    desk.gets_there = False
    with pytest.raises(UsageError, match="rejected"):
        HotUpdater("m", registry(desk)).test_canary(NEW)


@pytest.mark.parametrize(
    ("phase", "good", "winner"), [("hold", True, NEW), ("hold", False, None), ("rolled_back", False, OLD)]
)
def test_an_ab_test_names_its_winner(registry: Open, phase: str, good: bool, winner: str | None) -> None:
    found = ABTestFramework("m", registry(Desk(rollout(phase, good=good)))).run(NEW, share="1/2")
    assert found.winner == winner
    assert found.metrics == {"accuracy": (0.2, 0.1, 0.3)}


def test_traffic_is_switched_past_the_gate(registry: Open) -> None:
    desk = Desk(rollout("hold"))
    ABTestFramework("m", registry(desk)).switch_traffic(NEW)
    assert desk.asked == [("/v1/models/m/promote", {"version": NEW, "force": True})]
