"""The one next step, for what the database, the replicas and the gate may say. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from headrace_registry.lifecycle import (
    Action,
    Adopt,
    Probed,
    Promote,
    Reject,
    Release,
    RollBack,
    RunAudit,
    RunTrial,
    Situation,
    Wait,
    next_audit,
    objection,
    plan,
)
from headrace_registry.records import ModelRecord, ModelView, Standing, TrialResult, VersionRecord
from headrace_schemas import LoadedVersion, Replica
from headrace_schemas.blobs import BlobRef
from tests.unit.registry.rig import MODEL, START, loaded
from tests.unit.registry.test_probe import replica


def version(step: int, **fields: Any) -> VersionRecord:
    given: dict[str, Any] = {
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
    return VersionRecord(**{**given, **fields})


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
    """Those that are registered wait."""
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
    waiting = tuple(one for one in versions if one.state == "registered")
    return ModelView(
        record, {one.version: one for one in versions}, waiting, trial_result, frozenset(map(name, audited))
    )


def now(*replicas: Replica, gate: bool = True, **fields: Any) -> Situation:
    rollouts = {"watching": False, "slots": 1, "per_hour_max": 60, "updates_min": 1}
    return Situation(replicas=replicas, gate=gate, **{**rollouts, **fields})


def serving(*steps: int, at_s: float = 0) -> Replica:
    return replica("r", *(loaded(name(step)) for step in steps), at_s=at_s)


def refusing(step: int, *others: int) -> Replica:
    return replica("r", loaded(name(step), "failed", error="no memory"), *(loaded(name(one)) for one in others))


def chosen(action: Action) -> tuple[type[Action], str | None]:
    return type(action), getattr(action, "version", None)


CROWNED = version(1, state="promoted")
BEFORE = version(0, state="promoted")


def test_a_champion_that_nobody_can_serve_makes_room_for_a_previous_that_somebody_serves() -> None:
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
def test_what_waits_gets_its_turn_unless_the_model_is_held(fields: Any, expected: tuple[type[Action], str]) -> None:
    assert chosen(plan(view(CROWNED, version(2), champion=1, **fields), now())) == expected


def test_a_candidate_comes_before_what_waits_and_waits_again_when_the_model_is_held() -> None:
    versions = CROWNED, version(2, state="probing"), version(3)
    assert chosen(plan(view(*versions, champion=1, candidate=2), now(serving(2)))) == (Probed, name(2))
    assert plan(view(*versions, champion=1, candidate=2, paused=True), now(serving(2))) == Release(name(2))


def test_the_newest_is_next_and_the_older_ones_never() -> None:
    waiting = [version(step) for step in (2, 3, 4)]
    assert plan(view(CROWNED, *waiting, champion=1), now()) == Adopt(name(4), (name(2), name(3)))
    assert plan(view(CROWNED, waiting[0], champion=1), now()) == Adopt(name(2))


def test_a_model_without_a_champion_starts_with_its_earliest_step() -> None:
    waiting = [version(5, number=0), version(3, number=2), version(4, number=1)]
    assert plan(view(*waiting), now()) == Adopt(name(3))


def test_what_an_operator_asked_for_last_comes_first() -> None:
    early, late = START + timedelta(seconds=1), START + timedelta(seconds=2)
    asked = [version(2, request="gate", changed=late), version(3, request="force", changed=early), version(4)]
    assert plan(view(CROWNED, *asked, champion=1), now()) == Adopt(name(2))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, None),
        ({"tokenizer_sha256": "c" * 64}, "its tokenizer differs"),
        ({"template_sha256": "c" * 64}, "its chat template differs"),
        ({"base": name(0)}, None),
        ({"base": name(8)}, f"its base {name(8)} is withdrawn"),
        ({"base": name(9)}, f"its base {name(9)} is not registered"),
    ],
)
def test_what_can_never_serve_is_rejected_when_its_turn_comes(fields: Any, reason: str | None) -> None:
    new = version(2, **fields)
    seen = view(BEFORE, CROWNED, version(8, state="withdrawn"), new, champion=1)
    found = objection(new, seen)
    assert (found is None) if reason is None else (found or "").startswith(reason)
    assert plan(seen, now()) == (Adopt(name(2)) if reason is None else Reject(name(2), found or ""))
    if "sha256" in "".join(fields):
        assert objection(new, view(new)) is None, "without a champion it is the first of its kind"


BUSY = replace(view(CROWNED, version(2), champion=1, audited=(1,)), under_way=2, begun_lately=5)
"""A version waits while two rollouts are under way, of five that began within the hour."""


def test_a_version_waits_for_a_free_slot_unless_it_is_forced() -> None:
    full = Wait("2 rollouts are under way")
    assert plan(BUSY, now(slots=2)) == full
    assert plan(BUSY, now(slots=3)) == Adopt(name(2))
    assert plan(replace(BUSY, slots=2), now(slots=3)) == full, "those that go on keep the slots that they began with"
    assert plan(replace(BUSY, slots=3), now(slots=2)) == Adopt(name(2))
    forced = view(CROWNED, version(2, request="force"), version(3), champion=1)
    assert plan(replace(forced, under_way=2), now()) == Adopt(name(2))


def test_so_many_rollouts_begin_in_an_hour_and_no_more() -> None:
    said = Wait("5 rollouts began within the last hour: rollout.versions_per_hour_max")
    assert plan(BUSY, now(slots=3, rolls_out=True, per_hour_max=5)) == said
    assert plan(BUSY, now(slots=3, rolls_out=True, per_hour_max=6)) == Adopt(name(2))
    assert plan(BUSY, now(slots=3, per_hour_max=5)) == Adopt(name(2)), "versions need no rollout here"


def test_a_few_updates_are_not_worth_a_look_unless_somebody_asks_or_nothing_serves() -> None:
    two, three = [[version(step) for step in range(2, end)] for end in (4, 5)]
    said = Wait("2 of 3 updates: rollout.check_after_updates")
    assert plan(view(CROWNED, *two, champion=1, audited=(1,)), now(updates_min=3)) == said
    assert plan(view(CROWNED, *three, champion=1), now(updates_min=3)) == Adopt(name(4), (name(2), name(3)))
    asked = version(3, request="gate")
    assert plan(view(CROWNED, two[0], asked, champion=1), now(updates_min=3)) == Adopt(name(3))
    assert plan(view(*two), now(updates_min=3)) == Adopt(name(2))


def test_the_champion_is_measured_while_others_wait() -> None:
    unmeasured = replace(BUSY, audited=frozenset())
    assert plan(unmeasured, now(serving(1))) == RunAudit(name(1))
    assert plan(unmeasured, now(serving(0))) == Wait(f"no replica serves the champion {name(1)}")


def probing(state: str = "probing", changed_s: float = 0) -> ModelView:
    candidate = version(2, state=state, changed=START + timedelta(seconds=changed_s))
    return view(CROWNED, candidate, champion=1, candidate=2)


@pytest.mark.parametrize(
    ("held", "patience_over", "expected"),
    [
        (loaded(name(2)), False, (Probed, name(2))),
        (loaded(name(2)), True, (Probed, name(2))),
        (loaded(name(2), "loading"), False, (Wait, None)),
        (loaded(name(2), "loading"), True, (Reject, name(2))),
        (loaded(name(2), "failed"), False, (Reject, name(2))),
        (loaded(name(2), passed=False), False, (Reject, name(2))),
    ],
)
def test_the_probe_decides_first(
    held: LoadedVersion, patience_over: bool, expected: tuple[type[Action], str | None]
) -> None:
    assert chosen(plan(probing(), now(replica("r", held), patience_over=patience_over))) == expected


def test_time_is_not_over_unless_somebody_says_so() -> None:
    assert isinstance(plan(probing(), now(replica("r", loaded(name(2), "loading")))), Wait)


def test_heartbeats_from_before_it_was_adopted_say_nothing_of_a_candidate() -> None:
    old = serving(2, at_s=1)
    assert isinstance(plan(probing(changed_s=2), now(old)), Wait)
    found = plan(probing("evaluating", changed_s=2), now(serving(1, 2, at_s=1)))
    assert isinstance(found, RunTrial), "those after its probe do"


def judged(
    *,
    step: int = 2,
    request: str = "",
    champion: bool = True,
    served: Replica | None = None,
    gate: bool = True,
    audited: Iterable[int] = (1,),
    **fields: Any,
) -> Action:
    """Of a candidate that passed its probe, beside a champion that has been audited."""
    candidate = version(step, state="evaluating", request=request)
    about = {key: fields.pop(key) for key in ("trial_result", "anchor") if key in fields}
    others = (BEFORE, CROWNED) if champion else ()
    seen = view(*others, candidate, champion=1 if champion else None, candidate=step, audited=audited, **about)
    return plan(seen, now(served or serving(0, 1, step), gate=gate, **fields))


def found(*, passed: bool, champion: int | None = 1) -> TrialResult:
    standing = Standing(name(0), 3, "lead")
    return TrialResult(_named(champion), name(0), passed, "said so", {"difference": 0.5}, standing)


def test_what_needs_no_gate_is_promoted_after_its_probe() -> None:
    assert judged(request="force") == Promote(name(2), "an operator promoted it past the gate")
    assert chosen(judged(request="gate")) == (RunTrial, name(2))
    first = Promote(name(0), "the first version of its model: nothing to compare with")
    assert judged(step=0, champion=False) == first
    assert chosen(judged(step=0)) == (RunTrial, name(0)), "there is something to compare with"
    assert judged(gate=False) == Promote(name(2), "promoted after its probe: gate.command is empty")
    assert judged(champion=False) == Promote(name(2), "no champion: nothing to compare with")
    assert judged(champion=False, minimum_score=0.5) == RunTrial(name(2), None, None), "nobody knows how good it is"


def test_a_gate_that_failed_rejects_whom_it_failed_on() -> None:
    assert judged(failures={name(2): "boom"}) == Reject(name(2), "the gate failed: boom")
    assert chosen(judged(failures={name(3): "boom"})) == (RunTrial, name(2))


def test_a_verdict_is_acted_on_with_its_numbers_and_what_follows_for_the_anchor() -> None:
    for passed, action in ((True, Promote), (False, Reject)):
        trial_result = found(passed=passed)
        assert judged(trial_result=trial_result) == action(
            name(2), "said so", {"difference": 0.5}, trial_result.standing
        )


def test_a_verdict_on_another_champion_says_nothing() -> None:
    assert chosen(judged(trial_result=found(passed=True, champion=0))) == (RunTrial, name(2))
    assert chosen(judged(trial_result=found(passed=True, champion=None))) == (RunTrial, name(2))


def test_it_plays_against_those_whom_somebody_serves() -> None:
    assert judged() == RunTrial(name(2), name(1), None)
    assert judged(anchor=0) == RunTrial(name(2), name(1), name(0))
    way = replica("r", loaded(name(2)), loaded(name(1)), loaded(name(0), "loading"))
    assert judged(anchor=0, served=way) == Wait(f"no replica serves {name(0)}, the opponent of {name(2)}")
    gone = replica("r", loaded(name(2)), loaded(name(1)), loaded(name(0), "failed", error="no memory"))
    assert judged(anchor=0, served=gone) == RunTrial(name(2), name(1), None), "who is refused cannot serve"
    lost = replica("r", loaded(name(2)), loaded(name(1), "failed", error="no memory"), loaded(name(0)))
    assert judged(anchor=0, served=lost) == RunTrial(name(2), None, name(0))
    assert judged(served=lost) == Promote(
        name(2), f"no replica can serve the champion {name(1)}: nothing to compare with"
    )


@pytest.mark.parametrize("audited", [(), (1,), (0, 1)])
@pytest.mark.parametrize("failed", [(), (1,)])
def test_trial_never_waits_for_an_audit(audited: tuple[int, ...], failed: tuple[int, ...]) -> None:
    unmeasured = {name(step): "boom" for step in failed}
    assert chosen(judged(audited=audited, unmeasured=unmeasured)) == (RunTrial, name(2))
    assert chosen(judged(audited=audited, trial_result=found(passed=True))) == (Promote, name(2))


def test_next_audit_measures_the_champion_and_then_the_one_before_it() -> None:
    before, crowned = BEFORE, CROWNED
    both = now(serving(0, 1, 2))
    for audited, expected in (((), 1), ((1,), 0), ((0,), 1), ((0, 1), None)):
        audit = next_audit(view(before, crowned, champion=1, previous=0, audited=audited), both)
        assert audit == (None if expected is None else RunAudit(name(expected)))
    overtaken = view(before, crowned, champion=1, previous=0, audited=(1,))
    assert next_audit(overtaken, now(serving(1))) is None, "no replica serves it any more"
    assert next_audit(overtaken, now(serving(0, 1), unmeasured={name(0): "boom"})) is None
    assert next_audit(overtaken, now(serving(0, 1), gate=False)) is None
    withdrawn = view(replace(before, state="withdrawn"), crowned, champion=1, previous=0, audited=(1,))
    assert next_audit(withdrawn, both) is None


def test_a_champion_without_a_score_is_measured_when_nothing_waits() -> None:
    alone = view(CROWNED, champion=1)
    assert plan(alone, now(serving(1))) == RunAudit(name(1))
    assert plan(alone, now(serving(0))) == Wait(f"no replica serves the champion {name(1)}")
    assert plan(alone, now(serving(1), gate=False)) == Wait()
    assert plan(alone, now(serving(1), unmeasured={name(1): "boom"})) == Wait()
    assert plan(view(CROWNED, champion=1, audited=(1,)), now(serving(1))) == Wait()
    assert plan(view(), now(serving(1))) == Wait()
