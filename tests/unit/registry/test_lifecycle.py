"""Tests of the controller's next action for given states of the database, the replicas and the gate."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from headrace_registry.storage.records import AnchorState, ModelRecord, ModelView, TrialResult, VersionRecord
from headrace_registry.versions.lifecycle import (
    Action,
    Adopt,
    LifecycleInputs,
    Probed,
    Promote,
    Reject,
    Release,
    RollBack,
    RunAudit,
    RunTrial,
    Wait,
    incompatibility,
    next_audit,
    plan,
)
from headrace_schemas import LoadedVersion, Replica
from headrace_schemas.values.blobs import BlobRef
from tests.unit.registry.rig import MODEL, START, loaded
from tests.unit.registry.test_versions import replica


def version(step: int, **fields: Any) -> VersionRecord:
    record_fields: dict[str, Any] = {
        "number": step,
        "version": name(step),
        "model": MODEL,
        "lineage": "main",
        "step": step,
        "parent": None,
        "base": None,
        "manifest": BlobRef(uri="memory://manifest", sha256="0" * 64, size=1),
        "tokenizer_sha256": "a" * 64,
        "template_sha256": "b" * 64,
        "state": "registered",
        "request": "",
        "replaced": None,
        "registered": START,
        "changed": START,
    }
    return VersionRecord(**{**record_fields, **fields})


def name(step: int) -> str:
    return f"{MODEL}@{step:012x}"


def _named(step: int | None) -> str | None:
    return None if step is None else name(step)


def view(
    *versions: VersionRecord,
    champion: int | None = None,
    previous: int | None = None,
    candidate: int | None = None,
    anchor: int | None = None,
    pinned: int | None = None,
    paused: bool = False,
    trial_result: TrialResult | None = None,
    audited: Iterable[int] = (),
) -> ModelView:
    """Return a view of `versions`. Registered versions wait."""
    record = ModelRecord(
        model=MODEL,
        champion=_named(champion),
        previous=_named(previous),
        candidate=_named(candidate),
        pinned=_named(pinned),
        paused=paused,
        revision=0,
        routing=None,
        anchor=_named(anchor),
        trials=0,
        lead=None,
    )
    waiting = tuple(version_record for version_record in versions if version_record.state == "registered")
    return ModelView(
        record,
        {version_record.version: version_record for version_record in versions},
        waiting,
        trial_result,
        frozenset(map(name, audited)),
    )


def now(*replicas: Replica, gate: bool = True, **fields: Any) -> LifecycleInputs:
    rollouts = {"watching": False, "slots": 1, "per_hour_max": 60, "updates_min": 1}
    return LifecycleInputs(replicas=replicas, gate=gate, **{**rollouts, **fields})


def serving(*steps: int, at_s: float = 0) -> Replica:
    return replica("r", *(loaded(name(step)) for step in steps), at_s=at_s)


def refusing(step: int, *served_steps: int) -> Replica:
    return replica(
        "r",
        loaded(name(step), "failed", error="no memory"),
        *(loaded(name(served_step)) for served_step in served_steps),
    )


def action_and_version(action: Action) -> tuple[type[Action], str | None]:
    return type(action), getattr(action, "version", None)


CROWNED = version(1, state="promoted")
BEFORE = version(0, state="promoted")


def test_plan_rolls_back_an_unservable_champion() -> None:
    both = view(CROWNED, BEFORE, champion=1, previous=0)
    assert plan(both, now(refusing(1, 0))) == RollBack("no replica can serve it: no memory")
    assert not isinstance(plan(both, now(serving(1, 0))), RollBack)
    assert not isinstance(plan(both, now(refusing(1))), RollBack), "nobody serves the other one either"
    assert not isinstance(plan(both, now()), RollBack), "nobody is there"
    assert not isinstance(plan(view(CROWNED, champion=1), now(refusing(1))), RollBack)
    assert not isinstance(plan(view(BEFORE), now(refusing(1, 0))), RollBack)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (Adopt, name(2))),
        ({"paused": True}, (Wait, None)),
        ({"pinned": 1}, (Wait, None)),
    ],
)
def test_plan_adopts_a_waiting_version_unless_the_model_is_held(
    fields: Any, expected: tuple[type[Action], str]
) -> None:
    assert action_and_version(plan(view(CROWNED, version(2), champion=1, **fields), now())) == expected


def test_plan_advances_or_releases_the_candidate_first() -> None:
    versions = CROWNED, version(2, state="probing"), version(3)
    assert action_and_version(plan(view(*versions, champion=1, candidate=2), now(serving(2)))) == (Probed, name(2))
    assert plan(view(*versions, champion=1, candidate=2, paused=True), now(serving(2))) == Release(name(2))


def test_plan_adopts_the_newest_and_skips_older_versions() -> None:
    waiting = [version(step) for step in (2, 3, 4)]
    assert plan(view(CROWNED, *waiting, champion=1), now()) == Adopt(name(4), (name(2), name(3)))
    assert plan(view(CROWNED, waiting[0], champion=1), now()) == Adopt(name(2))


def test_plan_starts_a_model_with_its_earliest_step() -> None:
    waiting = [version(5, number=0), version(3, number=2), version(4, number=1)]
    assert plan(view(*waiting), now()) == Adopt(name(3))


def test_plan_prefers_the_last_requested_version() -> None:
    early, late = START + timedelta(seconds=1), START + timedelta(seconds=2)
    requested = [version(2, request="gate", changed=late), version(3, request="force", changed=early), version(4)]
    assert plan(view(CROWNED, *requested, champion=1), now()) == Adopt(name(2))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, None),
        ({"tokenizer_sha256": "c" * 64}, "its tokenizer differs"),
        ({"template_sha256": "c" * 64}, "its chat template differs"),
        ({"base": name(0)}, None),
        ({"base": name(8)}, f"its base {name(8)} is withdrawn"),
        ({"base": name(9)}, f"its base {name(9)} is not registered"),
        ({"base": name(7)}, f"its base {name(7)} is retired"),
        ({"retired_at": START}, "it is retired"),
    ],
)
def test_plan_rejects_an_incompatible_version(fields: Any, reason: str | None) -> None:
    new = version(2, **fields)
    others = version(7, state="rejected", retired_at=START), version(8, state="withdrawn")
    seen = view(BEFORE, CROWNED, *others, new, champion=1)
    refusal = incompatibility(new, seen)
    assert (refusal is None) if reason is None else (refusal or "").startswith(reason)
    assert plan(seen, now()) == (Adopt(name(2)) if reason is None else Reject(name(2), refusal or ""))
    if "sha256" in "".join(fields):
        assert incompatibility(new, view(new)) is None, "without a champion it is the first of its kind"


BUSY = replace(view(CROWNED, version(2), champion=1, audited=(1,)), under_way=2, rollouts_last_hour=5)
"""A version waits while two rollouts are under way, of five that began within the hour."""


def test_plan_waits_for_a_free_slot_unless_forced() -> None:
    full = Wait("2 rollouts are under way")
    assert plan(BUSY, now(slots=2)) == full
    assert plan(BUSY, now(slots=3)) == Adopt(name(2))
    assert plan(replace(BUSY, slots=2), now(slots=3)) == full, "those that go on keep the slots that they began with"
    assert plan(replace(BUSY, slots=3), now(slots=2)) == Adopt(name(2))
    forced = view(CROWNED, version(2, request="force"), version(3), champion=1)
    assert plan(replace(forced, under_way=2), now()) == Adopt(name(2))


def test_plan_limits_rollouts_per_hour() -> None:
    expected_wait = Wait("5 rollouts began within the last hour: rollout.versions_per_hour_max")
    assert plan(BUSY, now(slots=3, rollouts_by_default=True, per_hour_max=5)) == expected_wait
    assert plan(BUSY, now(slots=3, rollouts_by_default=True, per_hour_max=6)) == Adopt(name(2))
    assert plan(BUSY, now(slots=3, per_hour_max=5)) == Adopt(name(2)), "versions need no rollout here"


def test_plan_waits_for_enough_updates_without_a_request() -> None:
    two, three = [[version(step) for step in range(2, end)] for end in (4, 5)]
    expected_wait = Wait("2 of 3 updates: rollout.check_after_updates")
    assert plan(view(CROWNED, *two, champion=1, audited=(1,)), now(updates_min=3)) == expected_wait
    assert plan(view(CROWNED, *three, champion=1), now(updates_min=3)) == Adopt(name(4), (name(2), name(3)))
    requested = version(3, request="gate")
    assert plan(view(CROWNED, two[0], requested, champion=1), now(updates_min=3)) == Adopt(name(3))
    assert plan(view(*two), now(updates_min=3)) == Adopt(name(2))


def test_plan_audits_the_champion_while_versions_wait() -> None:
    unmeasured = replace(BUSY, audited=frozenset())
    assert plan(unmeasured, now(serving(1))) == RunAudit(name(1))
    assert plan(unmeasured, now(serving(0))) == Wait(f"no replica serves the champion {name(1)}")


def probing(state: str = "probing", changed_s: float = 0) -> ModelView:
    candidate = version(2, state=state, changed=START + timedelta(seconds=changed_s))
    return view(CROWNED, candidate, champion=1, candidate=2)


@pytest.mark.parametrize(
    ("entry", "probe_timed_out", "expected"),
    [
        (loaded(name(2)), False, (Probed, name(2))),
        (loaded(name(2)), True, (Probed, name(2))),
        (loaded(name(2), "loading"), False, (Wait, None)),
        (loaded(name(2), "loading"), True, (Reject, name(2))),
        (loaded(name(2), "failed"), False, (Reject, name(2))),
        (loaded(name(2), passed=False), False, (Reject, name(2))),
    ],
)
def test_plan_requires_the_probe_first(
    entry: LoadedVersion, probe_timed_out: bool, expected: tuple[type[Action], str | None]
) -> None:
    assert action_and_version(plan(probing(), now(replica("r", entry), probe_timed_out=probe_timed_out))) == expected


def test_plan_waits_for_the_probe_without_a_timeout() -> None:
    assert isinstance(plan(probing(), now(replica("r", loaded(name(2), "loading")))), Wait)


def test_plan_ignores_heartbeats_before_the_adoption() -> None:
    old = serving(2, at_s=1)
    assert isinstance(plan(probing(changed_s=2), now(old)), Wait)
    action = plan(probing("evaluating", changed_s=2), now(serving(1, 2, at_s=1)))
    assert isinstance(action, RunTrial), "those after its probe do"


def action_after_probe(
    *,
    step: int = 2,
    request: str = "",
    champion: bool = True,
    served: Replica | None = None,
    gate: bool = True,
    audited: Iterable[int] = (1,),
    **fields: Any,
) -> Action:
    """Return the action for a candidate that passed its probe, with a champion that has been audited."""
    candidate = version(step, state="evaluating", request=request)
    about = {key: fields.pop(key) for key in ("trial_result", "anchor") if key in fields}
    opponents = (BEFORE, CROWNED) if champion else ()
    seen = view(*opponents, candidate, champion=1 if champion else None, candidate=step, audited=audited, **about)
    return plan(seen, now(served or serving(0, 1, step), gate=gate, **fields))


def stored_result(*, passed: bool, champion: int | None = 1) -> TrialResult:
    anchor_state = AnchorState(name(0), 3, "lead")
    return TrialResult(_named(champion), name(0), passed, "said so", {"difference": 0.5}, anchor_state)


def test_plan_promotes_without_a_gate_after_the_probe() -> None:
    assert action_after_probe(request="force") == Promote(name(2), "an operator promoted it past the gate")
    assert action_and_version(action_after_probe(request="gate")) == (RunTrial, name(2))
    first = Promote(name(0), "the first version of its model: nothing to compare with")
    assert action_after_probe(step=0, champion=False) == first
    assert action_and_version(action_after_probe(step=0)) == (RunTrial, name(0)), "there is something to compare with"
    assert action_after_probe(gate=False) == Promote(name(2), "promoted after its probe: gate.command is empty")
    assert action_after_probe(champion=False) == Promote(name(2), "no champion: nothing to compare with")
    assert action_after_probe(champion=False, minimum_score=0.5) == RunTrial(name(2), None, None), (
        "nobody knows how good it is"
    )


def test_plan_rejects_a_candidate_after_gate_failures() -> None:
    assert action_after_probe(failures={name(2): "boom"}) == Reject(name(2), "the gate failed: boom")
    assert action_and_version(action_after_probe(failures={name(3): "boom"})) == (RunTrial, name(2))


def test_plan_applies_a_trial_result_with_its_anchor() -> None:
    for passed, action in ((True, Promote), (False, Reject)):
        trial_result = stored_result(passed=passed)
        assert action_after_probe(trial_result=trial_result) == action(
            name(2), "said so", {"difference": 0.5}, trial_result.anchor_state
        )


def test_plan_ignores_a_result_against_another_champion() -> None:
    assert action_and_version(action_after_probe(trial_result=stored_result(passed=True, champion=0))) == (
        RunTrial,
        name(2),
    )
    assert action_and_version(action_after_probe(trial_result=stored_result(passed=True, champion=None))) == (
        RunTrial,
        name(2),
    )


def test_plan_runs_a_trial_against_served_opponents() -> None:
    assert action_after_probe() == RunTrial(name(2), name(1), None)
    assert action_after_probe(anchor=0) == RunTrial(name(2), name(1), name(0))
    way = replica("r", loaded(name(2)), loaded(name(1)), loaded(name(0), "loading"))
    assert action_after_probe(anchor=0, served=way) == Wait(f"no replica serves {name(0)}, the opponent of {name(2)}")
    failed_replica = replica("r", loaded(name(2)), loaded(name(1)), loaded(name(0), "failed", error="no memory"))
    assert action_after_probe(anchor=0, served=failed_replica) == RunTrial(name(2), name(1), None), (
        "who is refused cannot serve"
    )
    lost = replica("r", loaded(name(2)), loaded(name(1), "failed", error="no memory"), loaded(name(0)))
    assert action_after_probe(anchor=0, served=lost) == RunTrial(name(2), None, name(0))
    assert action_after_probe(served=lost) == Promote(
        name(2), f"no replica can serve the champion {name(1)}: nothing to compare with"
    )


@pytest.mark.parametrize("audited", [(), (1,), (0, 1)])
@pytest.mark.parametrize("failed", [(), (1,)])
def test_plan_runs_a_trial_before_a_missing_audit(audited: tuple[int, ...], failed: tuple[int, ...]) -> None:
    unmeasured = {name(step): "boom" for step in failed}
    assert action_and_version(action_after_probe(audited=audited, unmeasured=unmeasured)) == (RunTrial, name(2))
    assert action_and_version(action_after_probe(audited=audited, trial_result=stored_result(passed=True))) == (
        Promote,
        name(2),
    )


def test_next_audit_measures_champion_and_then_previous() -> None:
    before, promote_in_turn = BEFORE, CROWNED
    both = now(serving(0, 1, 2))
    for audited, expected in (((), 1), ((1,), 0), ((0,), 1), ((0, 1), None)):
        audit = next_audit(view(before, promote_in_turn, champion=1, previous=0, audited=audited), both)
        assert audit == (None if expected is None else RunAudit(name(expected)))
    overtaken = view(before, promote_in_turn, champion=1, previous=0, audited=(1,))
    assert next_audit(overtaken, now(serving(1))) is None, "no replica serves it any more"
    assert next_audit(overtaken, now(serving(0, 1), unmeasured={name(0): "boom"})) is None
    assert next_audit(overtaken, now(serving(0, 1), gate=False)) is None
    withdrawn = view(replace(before, state="withdrawn"), promote_in_turn, champion=1, previous=0, audited=(1,))
    assert next_audit(withdrawn, both) is None


def test_plan_audits_an_unmeasured_champion_when_idle() -> None:
    alone = view(CROWNED, champion=1)
    assert plan(alone, now(serving(1))) == RunAudit(name(1))
    assert plan(alone, now(serving(0))) == Wait(f"no replica serves the champion {name(1)}")
    assert plan(alone, now(serving(1), gate=False)) == Wait()
    assert plan(alone, now(serving(1), unmeasured={name(1): "boom"})) == Wait()
    assert plan(view(CROWNED, champion=1, audited=(1,)), now(serving(1))) == Wait()
    assert plan(view(), now(serving(1))) == Wait()
