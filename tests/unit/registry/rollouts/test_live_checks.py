"""The checks of `make check NAME=rollouts` notice planted faults."""

from __future__ import annotations

from typing import Any

import pytest

from headrace_schemas import ModelEvent, RolloutStep, Routing, ServedVersion
from headrace_schemas.events.routing import Arm, TrafficSplit
from headrace_schemas.rules.assignment import assign_unit
from headrace_schemas.values.base import utcnow
from headrace_schemas.values.blobs import BlobRef
from tests.rollouts import checks
from tests.rollouts.visitors import Call, key_of

OLD, NEW = "m@0123456789abcdef", "m@fedcba9876543210"
SPLIT = TrafficSplit(unit="session", salt="s", slots=1, arms=(Arm(rollout_id="r", version=NEW, slot=0, share="1/2"),))
_NOW = utcnow()


def routing(revision: int, **changes: Any) -> Routing:
    blob = BlobRef(uri="blob", sha256="a" * 64, size=1)
    serve = tuple(ServedVersion(version=version, manifest=blob) for version in (OLD, NEW))
    fields = {"time": _NOW, "model": "m", "revision": revision, "aliases": {"champion": OLD}, "serve": serve, **changes}
    return Routing.model_validate(fields)


ON_TRIAL = {"aliases": {"champion": OLD, "canary": NEW}, "split": SPLIT}
PROMOTED = {"aliases": {"champion": NEW, "previous": OLD}}


def test_checks_accept_sound_histories() -> None:
    ended = routing(2, **PROMOTED), routing(2, withdrawn=(NEW,))
    for last in ended:
        assert checks.in_a_row([routing(0), routing(1, **ON_TRIAL), routing(1, **ON_TRIAL), last]) == []


@pytest.mark.parametrize(
    "last",
    [
        {**ON_TRIAL, "withdrawn": (NEW,)},
        {"aliases": {"champion": NEW, "canary": NEW}},
        {"aliases": {"champion": OLD}, "split": SPLIT},
        {**ON_TRIAL, "serve": ()},
        {**ON_TRIAL, "split": SPLIT.model_copy(update={"salt": "other"})},
    ],
    ids=["withdrawn with an arm", "canary and champion", "arm without canary", "not served", "other users"],
)
def test_checks_find_an_incomplete_routing(last: dict[str, Any]) -> None:
    assert checks.in_a_row([routing(0), routing(1, **ON_TRIAL), routing(2, **last)])


def test_checks_find_an_undecided_champion_and_a_withdrawal_that_ends() -> None:
    assert checks.in_a_row([routing(0), routing(1, **PROMOTED)])
    assert checks.in_a_row([routing(0), routing(1, withdrawn=(NEW,)), routing(2)])
    assert checks.in_a_row([routing(1), routing(0)])
    assert checks.in_a_row([routing(1), routing(1, **ON_TRIAL)])


def test_checks_find_a_step_decided_twice() -> None:
    def step(decision_id: str, stage: int) -> ModelEvent:
        step_event = RolloutStep(rollout_id="r", kind="advance", stage=stage, share="1/2")
        about = {"time": _NOW, "model": "m", "version": NEW, "decision": "probed", "decision_id": decision_id}
        return ModelEvent.model_validate({**about, "rollout": step_event})

    assert checks.once([step("a", 0), step("b", 1)]) == []
    assert checks.once([step("a", 1), step("b", 1)])


def test_checks_find_an_answer_of_a_withdrawn_version() -> None:
    drawn = [name for name in map(str, range(50)) if assign_unit(SPLIT, OLD, key_of(name))[0] == NEW]
    calls = [Call(drawn[0], 1.0, 2.0, NEW), Call(drawn[1], 3.5, 4.0, OLD), Call(drawn[2], 3.9, 4.5, NEW)]
    heard_s = checks.heard_by(calls, SPLIT, OLD, NEW, 3.0)
    assert heard_s == 4.0
    assert checks.answered_by(calls, NEW, heard_s) == [], "it began before the decision was heard"
    assert checks.answered_by([*calls, Call(drawn[0], 5.0, 6.0, NEW)], NEW, heard_s)
