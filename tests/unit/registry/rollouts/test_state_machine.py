"""Tests of the rollout state machine: each rule by example, and its invariants for random sequences of events."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from fractions import Fraction

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headrace_registry.rollouts import state_machine
from headrace_registry.rollouts.evidence import Findings
from headrace_registry.rollouts.plan import Guardrail, RolloutPlan, RolloutStage, Success
from headrace_registry.rollouts.state_machine import (
    ModelRolloutState,
    NotAllowed,
    Phase,
    Rollout,
    RolloutDecision,
    decide,
)

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
GOOD = Findings(successes=("reward not inferior",), shadow_units=10, candidates=50, controls=50)


def rollout(phase: Phase, stage: int = 0) -> Rollout:
    return Rollout("m@b", phase, stage, 0, 1, NOW, NOW)


@pytest.mark.parametrize(
    ("now", "findings", "after_s", "kind", "reason"),
    [
        (rollout("shadow"), Findings(shadow_units=9), 0, None, ""),
        (rollout("shadow"), Findings(shadow_units=10), 0, "advance", "no harm in 10 answers"),
        (rollout("shadow"), Findings(shadow_units=10, harmed=("loops at shadow",)), 0, "roll_back", "loops at shadow"),
        (rollout("shadow"), Findings(), 3600, "hold", "duration_max_s = 3600"),
        (rollout("canary"), GOOD, 59, None, ""),
        (rollout("canary"), replace(GOOD, candidates=19), 60, None, ""),
        (rollout("canary"), GOOD, 60, "advance", "at 1/10; on to 1/3"),
        (rollout("canary"), replace(GOOD, harmed=("reward at maturity",)), 60, "roll_back", "reward at maturity"),
        (rollout("canary"), replace(GOOD, sample_ratio_broken=True), 60, "hold", "not an even split"),
        (rollout("canary", 1), GOOD, 0, "promote", "reward not inferior; every guardrail"),
        (rollout("canary", 1), replace(GOOD, candidates=49), 0, None, ""),
        (rollout("canary", 1), replace(GOOD, open_guardrails=("missing",)), 0, None, ""),
        (rollout("canary", 1), replace(GOOD, successes=()), 3599, None, ""),
        (rollout("canary", 1), replace(GOOD, successes=()), 3600, "hold", "no success shown"),
        (rollout("canary", 1), replace(GOOD, open_guardrails=("missing",), candidates=500), 0, "hold", "units_max"),
        (rollout("canary", 1), replace(GOOD, candidates=500), 3600, "promote", "not inferior"),
        (rollout("hold"), replace(GOOD, harmed=("reward at closing",)), 0, None, ""),
        (rollout("rolled_back"), GOOD, 0, None, ""),
        (rollout("champion", 1), replace(GOOD, harmed=("reward at closing",)), 0, None, ""),
    ],
)
def test_decide_follows_the_rules(
    now: Rollout, findings: Findings, after_s: float, kind: str | None, reason: str
) -> None:
    decision = decide(PLAN, now, findings, NOW + timedelta(seconds=after_s))
    assert (decision.kind if decision else None) == kind
    assert reason in (decision.reason if decision else "")


def test_decide_prefers_harm_and_uneven_arms_to_a_promotion() -> None:
    both = replace(GOOD, harmed=("reward at maturity",), sample_ratio_broken=True)
    decision = decide(PLAN, rollout("canary", 1), both, NOW)
    assert decision is not None
    assert decision.kind == "roll_back"


def test_decide_holds_when_the_plan_does_not_promote() -> None:
    decision = decide(PLAN.model_copy(update={"promotes": False}), rollout("canary", 1), GOOD, NOW)
    assert decision is not None
    assert (decision.kind, "leaves it to an operator" in decision.reason) == ("hold", True)


def state(
    *steps: RolloutDecision, parents: dict[str, str | None] | None = None, plan: RolloutPlan = PLAN
) -> ModelRolloutState:
    result = ModelRolloutState("m@a", parents or {"m@a": None, "m@b": "m@a", "m@c": "m@b", "m@d": "m@a"})
    for step in steps:
        result, _ = state_machine.apply(plan, result, step)
    return result


def step(kind: state_machine.Kind, version: str, *, improved: bool = False) -> RolloutDecision:
    return RolloutDecision(kind, version, NOW, "because", improved=improved)


def test_apply_promotion_holds_other_rollouts() -> None:
    steps = [step("begin", "m@b"), step("begin", "m@d"), *[step("advance", "m@b")] * 2]
    before = state(*steps)
    assert before.shares(PLAN) == {"m@b": Fraction(1, 3)}
    assert before.split(PLAN, "salt").slots == ("m@b", "m@d")
    after, decisions = state_machine.apply(PLAN, before, step("promote", "m@b"))
    assert (after.champion, after.rollouts["m@d"].phase, after.family) == ("m@b", "hold", 2)
    assert [(decision.kind, decision.version) for decision in decisions] == [("promote", "m@b"), ("hold", "m@d")]
    assert state_machine.apply(PLAN, before, step("promote", "m@b", improved=True))[0].family == 0


def test_apply_rollback_includes_and_bars_descendants() -> None:
    under_way = state(step("begin", "m@b"), step("begin", "m@c"))
    after, decisions = state_machine.apply(PLAN, under_way, step("roll_back", "m@b"))
    assert [(decision.kind, decision.version) for decision in decisions] == [("roll_back", "m@b"), ("roll_back", "m@c")]
    for version in ("m@b", "m@c"):
        with pytest.raises(NotAllowed, match=f"{version} is barred: it was rolled back"):
            state_machine.begin(PLAN, after, version, NOW)
    with pytest.raises(NotAllowed, match="m@e is barred: m@b, which it descends from, was rolled back"):
        state_machine.begin(PLAN, replace(after, parents={**after.parents, "m@e": "m@b"}), "m@e", NOW)
    assert state_machine.begin(PLAN, after, "m@d", NOW).kind == "begin"


def test_barred_by_ignores_rollbacks_before_the_champion() -> None:
    """m@c became champion; then its parent m@b was rolled back. m@b is barred, but descendants of m@c are not."""
    parents = {"m@a": None, "m@b": "m@a", "m@c": "m@b", "m@e": "m@c"}
    present = state(
        step("begin", "m@c"), *[step("advance", "m@c")] * 2, step("promote", "m@c"), step("begin", "m@b"),
        step("roll_back", "m@b"), parents=parents,
    )  # fmt: skip
    assert present.barred_by("m@e") is None
    assert state_machine.begin(PLAN, present, "m@e", NOW).kind == "begin"
    with pytest.raises(NotAllowed, match="m@b is barred: it was rolled back"):
        state_machine.begin(PLAN, present, "m@b", NOW)


def test_apply_refuses_impossible_steps_with_the_reason() -> None:
    present = state(step("begin", "m@b"))
    for wrong, why in (
        ("m@a", "is the champion"), ("m@b", "already under way"), ("m@x", "is not registered"),
    ):  # fmt: skip
        with pytest.raises(NotAllowed, match=why):
            state_machine.begin(PLAN, present, wrong, NOW)
    with pytest.raises(NotAllowed, match="only the last stage promotes"):
        state_machine.apply(PLAN, present, step("promote", "m@b"))
    with pytest.raises(NotAllowed, match="m@d has no rollout"):
        state_machine.stop(present, "m@d", "why not", NOW)
    full = state(
        step("begin", "m@b"), step("begin", "m@d"), parents={"m@a": None, "m@b": None, "m@d": None, "m@e": None}
    )
    with pytest.raises(NotAllowed, match="m@e has no free slot: m@b, m@d use all"):
        state_machine.begin(PLAN, full, "m@e", NOW)


VERSIONS = [f"m@{letter}" for letter in "abcdef"]


class Rollouts(RuleBasedStateMachine):
    """Hypothesis state machine of random evidence and operator actions.

    The parents of all versions are drawn once and may form a cycle.
    """

    def __init__(self) -> None:
        super().__init__()
        self.state = ModelRolloutState("m@a", {})
        self.first = self.state
        self.now = NOW
        self.decisions: list[RolloutDecision] = []
        self.applied: list[RolloutDecision] = []
        self.rolled_back: set[str] = set()

    @rule(parents=st.lists(st.sampled_from([None, *VERSIONS]), min_size=6, max_size=6))
    def register(self, parents: list[str | None]) -> None:
        if not self.state.parents:
            self.state = self.first = ModelRolloutState("m@a", dict(zip(VERSIONS, parents, strict=True)))

    @rule(version=st.sampled_from(VERSIONS))
    def begin(self, version: str) -> None:
        barred = self.state.barred_by(version)
        try:
            self._do(state_machine.begin(PLAN, self.state, version, self.now))
        except NotAllowed:
            return
        assert barred is None

    @rule(version=st.sampled_from(VERSIONS), back=st.booleans())
    def operator(self, version: str, back: bool) -> None:
        ask = state_machine.roll_back if back else state_machine.stop
        try:
            self._do(ask(self.state, version, "an operator", self.now))
        except NotAllowed:
            assert version not in {rollout.version for rollout in self.state.under_way}

    @rule(
        version=st.sampled_from(VERSIONS), harmed=st.booleans(), ready=st.booleans(), uneven=st.booleans(),
        improved=st.booleans(), hours=st.integers(0, 2),
    )  # fmt: skip
    def look(self, version: str, harmed: bool, ready: bool, uneven: bool, improved: bool, hours: int) -> None:
        self.now += timedelta(hours=hours / 4)
        findings = Findings(
            ("reward at maturity",) if harmed else (), () if ready else ("missing",),
            ("reward",) if ready else (), improved, uneven, 10, 50, 50,
        )  # fmt: skip
        for rollout in self.state.under_way:
            if rollout.version == version:
                decision = decide(PLAN, rollout, findings, self.now)
                assert decision == decide(PLAN, rollout, findings, self.now)
                if decision:
                    self._do(decision)

    def _do(self, decision: RolloutDecision) -> None:
        self.state, decisions = state_machine.apply(PLAN, self.state, decision)
        self.applied.append(decision)
        self.decisions += decisions
        self.rolled_back |= {rollout.version for rollout in decisions if rollout.kind == "roll_back"}

    @invariant()
    def one_champion_that_was_never_rolled_back(self) -> None:
        champions = [rollout.version for rollout in self.state.rollouts.values() if rollout.phase == "champion"]
        assert champions in ([], [self.state.champion])
        assert self.state.champion not in self.rolled_back
        assert self.state.champion not in {rollout.version for rollout in self.state.under_way}

    @invariant()
    def a_rollback_is_final(self) -> None:
        assert all(self.state.rollouts[version].phase == "rolled_back" for version in self.rolled_back)

    @invariant()
    def barred_versions_never_serve(self) -> None:
        assert all(self.state.barred_by(rollout.version) is None for rollout in self.state.under_way)

    @invariant()
    def arms_fit_and_slots_are_distinct(self) -> None:
        shares = self.state.shares(PLAN)
        assert sum(shares.values(), Fraction(0)) + max(shares.values(), default=Fraction(0)) <= 1
        slots = [rollout.slot for rollout in self.state.under_way]
        assert len(set(slots)) == len(slots) <= PLAN.slots
        self.state.split(PLAN, "salt").assign("anybody", shares)

    @invariant()
    def decisions_reproduce_the_state(self) -> None:
        again = self.first
        for decision in self.applied:
            again, _ = state_machine.apply(PLAN, again, decision)
        assert again == self.state


Rollouts.TestCase.settings = settings(max_examples=60, stateful_step_count=25)
TestRollouts = Rollouts.TestCase
