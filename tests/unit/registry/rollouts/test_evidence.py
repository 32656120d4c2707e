"""Tests of rollout plans, of the age and order of readings, and of the evidence from them."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from benchmarks._rollout_trials import NEVER, play
from benchmarks._rollout_worlds import Sessions, World, draw_sessions, readings
from headrace_registry.rollouts import metrics
from headrace_registry.rollouts.evidence import ARMS, SILENT_UNITS, Evidence
from headrace_registry.rollouts.metrics import SessionRecord
from headrace_registry.rollouts.plan import (
    Guardrail,
    RolloutPlan,
    RolloutStage,
    Success,
    Unit,
    UnitReading,
    due_units,
    read_unit,
)
from headrace_schemas import Reward
from headrace_statistics import e_process

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SMALL = RolloutPlan(
    guardrails=(Guardrail(metric="reward", margin=0.2), Guardrail(metric="missing", margin=0.2)),
    successes=(Success(metric="reward", kind="improved", margin=0.2), Success(metric="missing", margin=0.2)),
)


def unit(number: int, *, candidate: bool = True) -> Unit:
    return Unit(f"u{number:05}", candidate, NOW + timedelta(seconds=number))


def evidence_after(
    plan: RolloutPlan, count: int, candidate: float, control: float, *, look: Any = "closing"
) -> Evidence:
    """Return the evidence after `count` units, alternately of both arms, with a constant reward for each arm."""
    evidence = Evidence(plan)
    for number in range(count):
        mine = number % 2 == 0
        reading = UnitReading(unit(number, candidate=mine), {"reward": candidate if mine else control, "missing": 0.0})
        evidence.add_reading(look, reading)
    return evidence


def test_plan_errors_add_up_to_beta_and_alpha() -> None:
    for plan in (RolloutPlan(), RolloutPlan(shadow_units=50), RolloutPlan(maturity_s=60, closing_s=60)):
        spent = sum(plan.harm_error(guardrail, look) for guardrail in plan.guardrails for look in plan.reading_ages)
        assert spent == pytest.approx(plan.beta)
    assert list(RolloutPlan(maturity_s=60, closing_s=60).reading_ages) == ["maturity"]
    assert list(RolloutPlan(shadow_units=1).reading_ages) == ["shadow", "maturity", "closing"]
    claims = sum(3 * e_process.success_error(0.05, number, 3) for number in range(1, 5000))
    assert 0.0399 < claims < 0.04


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"closing_s": 10.0}, "closing_s = 10 is before maturity_s = 600"),
        ({"window_s": 5.0}, 'window_s = 5 is for unit = "user"'),
        ({"stages": ({"share": "1/2"}, {"share": "1/10"})}, "each stage has more than the one before"),
        ({"stages": ({"share": "2/3"},)}, "less than or equal to 1/2"),
        ({"guardrails": ({"metric": "missing", "margin": 2.0},)}, "its bounds are only 1 apart"),
        ({"guardrails": ({"metric": "reward", "margin": 0.1},)}, "without a guardrail on missing"),
        ({"guardrails": ({"metric": "missing", "margin": 0.1},) * 2}, "name each metric once"),
        ({"guardrails": ({"metric": "missing", "margin": 0.1, "tolerated": 0.1},)}, "set it below the margin 0.1"),
        ({"guardrails": ({"metric": "rewrad", "margin": 0.1},)}, "did you mean 'reward'"),
        ({"successes": ({"metric": "reward", "margin": 0.1, "bounds": (0, 2)},)}, "other bounds as a guardrail"),
    ],
)
def test_plan_refuses_inconsistent_settings(change: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        RolloutPlan.model_validate(change)


def test_plan_survives_json() -> None:
    plan = RolloutPlan(stages=(RolloutStage(share=Fraction(1, 3)),))
    assert RolloutPlan.model_validate_json(plan.model_dump_json()) == plan


def test_due_units_are_of_that_age_in_the_order_of_arrival() -> None:
    units = [unit(5), unit(1), unit(3, candidate=False)]
    assert due_units(units, NOW + timedelta(seconds=62), 60) == [unit(1)]
    assert due_units(units, NOW + timedelta(seconds=63), 60) == [unit(1), unit(3, candidate=False)]
    same = [Unit(name, name == "b", NOW) for name in ("c", "b", "a")]
    assert [due_unit.name for due_unit in due_units(same, NOW, 0)] == ["a", "b", "c"]


def test_read_unit_uses_events_known_at_that_age_and_the_mean_of_a_user() -> None:
    def rewarded(value: float, at: float, revision: int = 0) -> Reward:
        when = NOW + timedelta(seconds=at)
        return Reward(trajectory_id="t", session_key="a" * 16, source="f", time=when, value=value, revision=revision)

    sessions = [
        SessionRecord("a" * 16, rewards=(rewarded(0.0, 10), rewarded(1.0, 500, revision=1))),
        SessionRecord("b" * 16, rewards=(rewarded(0.5, 100),)),
        SessionRecord("c" * 16),
    ]
    rollout_metrics = {name: metrics.metric_named(name) for name in ("reward", "missing", "loops")}
    first = Unit("u", True, NOW)
    assert read_unit(first, sessions, rollout_metrics, 60).values == {"reward": 0.0, "missing": pytest.approx(2 / 3)}
    assert read_unit(first, sessions, rollout_metrics, 600).values == {"reward": 0.75, "missing": pytest.approx(1 / 3)}


def test_evidence_refuses_readings_out_of_order() -> None:
    evidence = evidence_after(SMALL, 3, 1.0, 1.0)
    with pytest.raises(ValueError, match="u00002 after u00002"):
        evidence.add_reading("closing", UnitReading(unit(2), {}))


def test_evidence_shows_an_improvement() -> None:
    findings = evidence_after(SMALL, 400, 0.9, 0.5).findings()
    assert (findings.successes, findings.improved, findings.harmed, findings.open_guardrails) == (
        ("reward improved", "missing not inferior"), True, (), (ARMS,),
    )  # fmt: skip
    assert findings.statistics["reward.difference"] == pytest.approx(0.4, abs=0.05)
    assert findings.statistics["reward.lower"] < 0.4 < findings.statistics["reward.upper"]


def test_evidence_of_harm_at_the_first_reading_stays() -> None:
    evidence = evidence_after(SMALL, 300, 0.4, 0.8, look="maturity")
    assert evidence.findings().harmed == ("reward at maturity",)
    for number in range(300, 2000):
        evidence.add_reading(
            "maturity", UnitReading(unit(number, candidate=number % 2 == 0), {"reward": number % 2 == 0})
        )
    assert evidence.findings().harmed == ("reward at maturity",)
    assert "missing" in evidence.findings().open_guardrails  # nothing is closed yet


def test_evidence_reports_the_limits_of_the_rules_that_refuse_or_are_open() -> None:
    limits = {
        name: number
        for name, number in evidence_after(SMALL, 300, 0.4, 0.8, look="maturity").statistics().items()
        if name.endswith("limit")
    }
    assert limits == {
        "uneven_limit": SMALL.uneven, "reward.harm_limit": 0.0, "reward.limit": -0.2, "missing.limit": 0.2,
        "reward.success_limit": 0.0, "missing.success_limit": 0.2, "reward.stage_3_limit": -0.2,
    }  # fmt: skip


def test_evidence_uses_revisions_before_the_closing_age() -> None:
    evidence = evidence_after(SMALL, 300, 0.8, 0.8, look="maturity")
    for number in range(300):
        mine = number % 2 == 0
        evidence.add_reading("closing", UnitReading(unit(number, candidate=mine), {"reward": 0.3 if mine else 0.8}))
    assert evidence.findings().harmed == ("reward at closing",)


def test_evidence_reports_lower_is_better_metrics_in_their_own_direction() -> None:
    plan = RolloutPlan(
        guardrails=(Guardrail(metric="latency", margin=5.0),), successes=(Success(metric="latency", margin=5.0),)
    )
    evidence = Evidence(plan)
    for number in range(600):
        mine = number % 2 == 0
        evidence.add_reading("maturity", UnitReading(unit(number, candidate=mine), {"latency": 30.0 if mine else 10.0}))
    findings = evidence.findings()
    assert findings.harmed == ("latency at maturity",)
    assert findings.statistics["latency.difference"] == pytest.approx(20.0, abs=2.0)


def test_evidence_compares_both_answers_of_a_shadow() -> None:
    plan = SMALL.model_copy(update={"shadow_units": 20})
    evidence = Evidence(plan)
    for _ in range(60):
        evidence.add_shadow_pair({"reward": 0.2, "missing": 0.0}, {"reward": 0.7})
    findings = evidence.findings()
    assert (findings.harmed, findings.shadow_units, findings.candidates) == (("reward at shadow",), 60, 0)
    assert findings.statistics["reward.difference"] == pytest.approx(-0.5)


def test_guardrail_without_values_does_not_block_a_promotion() -> None:
    """A guardrail metric blocks a promotion only if at least one unit has a value, for example a tool error rate."""
    plan = SMALL.model_copy(update={"guardrails": (*SMALL.guardrails, Guardrail(metric="tool_errors", margin=0.2))})

    def open_after(count: int, *, said_by: int | None = None) -> bool:
        evidence = Evidence(plan)
        for number in range(count):
            values = {"reward": 1.0, "missing": 0.0} | ({"tool_errors": 0.0} if number == said_by else {})
            for look in plan.reading_ages:
                evidence.add_reading(look, UnitReading(unit(number, candidate=number % 2 == 0), values))
        findings = evidence.findings(numbers=False)
        later = [names for names in findings.too_risky.values() if "tool_errors" in names]
        assert bool(later) == ("tool_errors" in findings.open_guardrails)
        return bool(later)

    assert open_after(2 * SILENT_UNITS - 1)
    assert not open_after(2 * SILENT_UNITS)
    assert open_after(2 * SILENT_UNITS, said_by=3)


def test_evidence_detects_uneven_arms_without_metric_values() -> None:
    evidence = Evidence(SMALL)
    for number in range(400):
        evidence.add_reading("maturity", UnitReading(unit(number, candidate=number % 3 == 0), {}))
    assert evidence.findings().sample_ratio_broken
    assert ARMS in evidence.findings().open_guardrails


def test_evidence_statistics_fit_an_event() -> None:
    names = [name for name in metrics.METRICS.names() if name not in ("reward", "missing")]
    guarded = ["reward", "missing", *names[:6]]
    plan = RolloutPlan(
        shadow_units=1,
        guardrails=tuple(Guardrail(metric=name, margin=0.1) for name in guarded),
        successes=tuple(Success(metric=name, margin=0.1) for name in names[6:10]),
    )
    evidence = Evidence(plan)
    for number in range(4):
        reading = UnitReading(unit(number, candidate=number % 2 == 0), dict.fromkeys(evidence.metrics, 0.5))
        evidence.add_reading("maturity", reading)
        evidence.add_reading("closing", reading)
    statistics = evidence.statistics()
    assert len(statistics) <= 64
    assert all(math.isfinite(value) for value in statistics.values())


def _drawn(chance: np.random.Generator, world: World, count: int, runs: int, expects: bool) -> list[Sessions]:
    drawn = [draw_sessions(chance, world, number, runs) for number in range(count)]
    for sessions in drawn if expects else ():
        sessions.expected |= {"reward": chance.random(runs), "tool_errors": chance.random(runs)}
    return drawn


@pytest.mark.parametrize(
    ("world", "seed", "expects"),
    [(World(), 0, False), (World(worse=0.25), 1, False), (World(missing_more=0.5), 2, False), (World(), 3, True)],
)
def test_evidence_agrees_with_the_benchmark(world: World, seed: int, expects: bool) -> None:
    """The registry and the benchmark reach each conclusion at the same session for the same random data."""
    print(f"seed {seed}")
    plan, runs, count = RolloutPlan(), 3, 250
    chance = np.random.default_rng(seed)
    drawn = _drawn(chance, world, count, runs, expects)
    simulated = play(chance, plan, world, count, runs, source=lambda number: drawn[number])
    for run in range(runs):
        evidence, harmed, safe, entered = Evidence(plan), dict[str, int](), dict[str, int](), dict[int, int]()
        for number, sessions in enumerate(drawn):
            for look in plan.reading_ages:
                evidence.add_reading(look, readings(sessions, number, look, world.every_s)[run])
            now = evidence.findings(numbers=False)
            if ARMS not in now.open_guardrails:
                safe.setdefault(ARMS, number)
            assert min(evidence.monitor("reward", "maturity").units_with_value) == simulated.valued[number, run]
            for stage_index in range(1, len(plan.stages)):
                if stage_index not in now.too_risky:
                    entered.setdefault(stage_index, number)
            for name in now.harmed:
                harmed.setdefault(name, number)
            for guardrail in plan.guardrails:
                if guardrail.metric not in now.open_guardrails:
                    safe.setdefault(guardrail.metric, number)
        simulated_harm = {
            f"{name} at {look}": int(at[run]) for (name, look), at in simulated.harm.items() if at[run] < NEVER
        }
        assert harmed == simulated_harm
        assert entered == {
            entry: int(at[run]) for entry, at in enumerate(simulated.entries) if entry and at[run] < NEVER
        }
        simulated_tests = {**simulated.safe, ARMS: simulated.even}
        assert safe == {name: int(at[run]) for name, at in simulated_tests.items() if at[run] < NEVER}
        ratio = simulated.ratio[run] < NEVER
        assert evidence.findings(numbers=False).sample_ratio_broken == ratio
