"""The state machine: its rule case by case, and its invariants under whatever comes in whatever order."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from fractions import Fraction

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headrace_registry.rollouts import machine
from headrace_registry.rollouts.evidence import Findings
from headrace_registry.rollouts.machine import Book, NotAllowed, Phase, Rollout, RolloutDecision, judge
from headrace_registry.rollouts.plan import Guardrail, RolloutPlan, RolloutStage, Success

NOW = datetime(2026, 1, 1, tzinfo=UTC)
PLAN = RolloutPlan(
    slots=2,
    shadow_units=10,
    stages=(
        RolloutStage(share=Fraction(1, 10), units_min=20, duration_min_s=60),
        RolloutStage(share=Fraction(1, 3), units_min=50),
    ),
    guardrails=(Guardrail(metric="reward", margin=0.1), Guardrail(metric="missing", margin=0.1)),
    successes=(Success(metric="reward", margin=0.1),),
    units_max=500,
    duration_max_s=3600,
)
GOOD = Findings(shown=("reward not inferior",), shadow_units=10, candidates=50, controls=50)


def rollout(phase: Phase, stage: int = 0) -> Rollout:
    return Rollout("m@b", phase, stage, 0, 1, NOW, NOW)


@pytest.mark.parametrize(
    ("now", "found", "after_s", "kind", "reason"),
    [
        (rollout("shadow"), Findings(shadow_units=9), 0, None, ""),
        (rollout("shadow"), Findings(shadow_units=10), 0, "advance", "no harm in 10 answers"),
        (rollout("shadow"), Findings(shadow_units=10, harmed=("loops at shadow",)), 0, "roll_back", "loops at shadow"),
        (rollout("shadow"), Findings(), 3600, "hold", "duration_max_s = 3600"),
        (rollout("canary"), GOOD, 59, None, ""),
        (rollout("canary"), replace(GOOD, candidates=19), 60, None, ""),
        (rollout("canary"), GOOD, 60, "advance", "at 1/10; on to 1/3"),
        (rollout("canary"), replace(GOOD, harmed=("reward at maturity",)), 60, "roll_back", "reward at maturity"),
        (rollout("canary"), replace(GOOD, sample_ratio_broken=True), 60, "hold", "no even split"),
        (rollout("canary", 1), GOOD, 0, "promote", "reward not inferior; every guardrail"),
        (rollout("canary", 1), replace(GOOD, candidates=49), 0, None, ""),
        (rollout("canary", 1), replace(GOOD, open_guardrails=("missing",)), 0, None, ""),
        (rollout("canary", 1), replace(GOOD, shown=()), 3599, None, ""),
        (rollout("canary", 1), replace(GOOD, shown=()), 3600, "hold", "no success shown"),
        (rollout("canary", 1), replace(GOOD, open_guardrails=("missing",), candidates=500), 0, "hold", "units_max"),
        (rollout("canary", 1), replace(GOOD, candidates=500), 3600, "promote", "not inferior"),
        (rollout("hold"), replace(GOOD, harmed=("reward at closing",)), 0, None, ""),
        (rollout("rolled_back"), GOOD, 0, None, ""),
        (rollout("champion", 1), replace(GOOD, harmed=("reward at closing",)), 0, None, ""),
    ],
)
def test_the_rule(now: Rollout, found: Findings, after_s: float, kind: str | None, reason: str) -> None:
    decision = judge(PLAN, now, found, NOW + timedelta(seconds=after_s))
    assert (decision.kind if decision else None) == kind
    assert reason in (decision.reason if decision else "")


def test_harm_and_bad_arms_come_before_a_promotion() -> None:
    both = replace(GOOD, harmed=("reward at maturity",), sample_ratio_broken=True)
    found = judge(PLAN, rollout("canary", 1), both, NOW)
    assert found is not None
    assert found.kind == "roll_back"


def test_a_plan_that_promotes_nobody_tells_and_holds() -> None:
    found = judge(PLAN.model_copy(update={"promotes": False}), rollout("canary", 1), GOOD, NOW)
    assert found is not None
    assert (found.kind, "leaves it to an operator" in found.reason) == ("hold", True)


def book(*steps: RolloutDecision, parents: dict[str, str | None] | None = None, plan: RolloutPlan = PLAN) -> Book:
    found = Book("m@a", parents or {"m@a": None, "m@b": "m@a", "m@c": "m@b", "m@d": "m@a"})
    for step in steps:
        found, _ = machine.apply(plan, found, step)
    return found


def step(kind: machine.Kind, version: str, *, improved: bool = False) -> RolloutDecision:
    return RolloutDecision(kind, version, NOW, "because", improved=improved)


def test_from_the_shadow_to_champion_and_the_others_hold() -> None:
    steps = [step("begin", "m@b"), step("begin", "m@d"), *[step("advance", "m@b")] * 2]
    before = book(*steps)
    assert before.shares(PLAN) == {"m@b": Fraction(1, 3)}
    assert before.split(PLAN, "salt").slots == ("m@b", "m@d")
    after, told = machine.apply(PLAN, before, step("promote", "m@b"))
    assert (after.champion, after.rollouts["m@d"].phase, after.family) == ("m@b", "hold", 2)
    assert [(one.kind, one.version) for one in told] == [("promote", "m@b"), ("hold", "m@d")]
    assert machine.apply(PLAN, before, step("promote", "m@b", improved=True))[0].family == 0


def test_children_of_what_was_rolled_back_are_barred_and_taken_along() -> None:
    under_way = book(step("begin", "m@b"), step("begin", "m@c"))
    after, told = machine.apply(PLAN, under_way, step("roll_back", "m@b"))
    assert [(one.kind, one.version) for one in told] == [("roll_back", "m@b"), ("roll_back", "m@c")]
    for version in ("m@b", "m@c"):
        with pytest.raises(NotAllowed, match=f"{version} is barred: it was rolled back"):
            machine.begin(PLAN, after, version, NOW)
    with pytest.raises(NotAllowed, match="m@e is barred: m@b, which it descends from, was rolled back"):
        machine.begin(PLAN, replace(after, parents={**after.parents, "m@e": "m@b"}), "m@e", NOW)
    assert machine.begin(PLAN, after, "m@d", NOW).kind == "begin"


def test_a_champion_behind_a_rollback_earned_its_place() -> None:
    """m@c became champion; then m@b, its parent, is tried and rolled back. What descends from m@c is not
    barred; m@b itself is."""
    parents = {"m@a": None, "m@b": "m@a", "m@c": "m@b", "m@e": "m@c"}
    there = book(
        step("begin", "m@c"), *[step("advance", "m@c")] * 2, step("promote", "m@c"), step("begin", "m@b"),
        step("roll_back", "m@b"), parents=parents,
    )  # fmt: skip
    assert there.barred_by("m@e") is None
    assert machine.begin(PLAN, there, "m@e", NOW).kind == "begin"
    with pytest.raises(NotAllowed, match="m@b is barred: it was rolled back"):
        machine.begin(PLAN, there, "m@b", NOW)


def test_what_there_is_no_step_for_is_refused_by_name() -> None:
    there = book(step("begin", "m@b"))
    for wrong, why in (
        ("m@a", "is the champion"), ("m@b", "under way already"), ("m@x", "is not registered"),
    ):  # fmt: skip
        with pytest.raises(NotAllowed, match=why):
            machine.begin(PLAN, there, wrong, NOW)
    with pytest.raises(NotAllowed, match="only the last stage promotes"):
        machine.apply(PLAN, there, step("promote", "m@b"))
    with pytest.raises(NotAllowed, match="m@d has no rollout"):
        machine.stop(there, "m@d", "why not", NOW)
    full = book(
        step("begin", "m@b"), step("begin", "m@d"), parents={"m@a": None, "m@b": None, "m@d": None, "m@e": None}
    )
    with pytest.raises(NotAllowed, match="m@e finds no slot: m@b, m@d are under way"):
        machine.begin(PLAN, full, "m@e", NOW)


VERSIONS = [f"m@{letter}" for letter in "abcdef"]


class Rollouts(RuleBasedStateMachine):
    """Whatever evidence and operators do. Parents are drawn once; a ring is as good as a line."""

    def __init__(self) -> None:
        super().__init__()
        self.book = Book("m@a", {})
        self.first = self.book
        self.now = NOW
        self.told: list[RolloutDecision] = []
        self.given: list[RolloutDecision] = []
        self.rolled_back: set[str] = set()

    @rule(parents=st.lists(st.sampled_from([None, *VERSIONS]), min_size=6, max_size=6))
    def register(self, parents: list[str | None]) -> None:
        if not self.book.parents:
            self.book = self.first = Book("m@a", dict(zip(VERSIONS, parents, strict=True)))

    @rule(version=st.sampled_from(VERSIONS))
    def begin(self, version: str) -> None:
        barred = self.book.barred_by(version)
        try:
            self._do(machine.begin(PLAN, self.book, version, self.now))
        except NotAllowed:
            return
        assert barred is None

    @rule(version=st.sampled_from(VERSIONS), back=st.booleans())
    def operator(self, version: str, back: bool) -> None:
        ask = machine.roll_back if back else machine.stop
        try:
            self._do(ask(self.book, version, "an operator", self.now))
        except NotAllowed:
            assert version not in {one.version for one in self.book.under_way}

    @rule(
        version=st.sampled_from(VERSIONS), harmed=st.booleans(), ready=st.booleans(), uneven=st.booleans(),
        improved=st.booleans(), hours=st.integers(0, 2),
    )  # fmt: skip
    def look(self, version: str, harmed: bool, ready: bool, uneven: bool, improved: bool, hours: int) -> None:
        self.now += timedelta(hours=hours / 4)
        found = Findings(
            ("reward at maturity",) if harmed else (), () if ready else ("missing",),
            ("reward",) if ready else (), improved, uneven, 10, 50, 50,
        )  # fmt: skip
        for one in self.book.under_way:
            if one.version == version:
                decision = judge(PLAN, one, found, self.now)
                assert decision == judge(PLAN, one, found, self.now)
                if decision:
                    self._do(decision)

    def _do(self, decision: RolloutDecision) -> None:
        self.book, told = machine.apply(PLAN, self.book, decision)
        self.given.append(decision)
        self.told += told
        self.rolled_back |= {one.version for one in told if one.kind == "roll_back"}

    @invariant()
    def there_is_one_champion_and_it_never_was_taken_back(self) -> None:
        champions = [one.version for one in self.book.rollouts.values() if one.phase == "champion"]
        assert champions in ([], [self.book.champion])
        assert self.book.champion not in self.rolled_back
        assert self.book.champion not in {one.version for one in self.book.under_way}

    @invariant()
    def a_rollback_is_final(self) -> None:
        assert all(self.book.rollouts[one].phase == "rolled_back" for one in self.rolled_back)

    @invariant()
    def nobody_who_is_barred_serves(self) -> None:
        assert all(self.book.barred_by(one.version) is None for one in self.book.under_way)

    @invariant()
    def arms_fit_and_slots_are_ones_own(self) -> None:
        shares = self.book.shares(PLAN)
        assert sum(shares.values(), Fraction(0)) + max(shares.values(), default=Fraction(0)) <= 1
        slots = [one.slot for one in self.book.under_way]
        assert len(set(slots)) == len(slots) <= PLAN.slots
        self.book.split(PLAN, "salt").assign("anybody", shares)

    @invariant()
    def the_decisions_are_all_there_is(self) -> None:
        again = self.first
        for decision in self.given:
            again, _ = machine.apply(PLAN, again, decision)
        assert again == self.book


Rollouts.TestCase.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestRollouts = Rollouts.TestCase
