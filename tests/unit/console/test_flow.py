"""Tests that the console finds the cause of missing training, and distinguishes learning from noise."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from headrace_console.charts import Line, Mark, interval_chart
from headrace_console.flow import Cause, Facts, find_cause
from headrace_console.flow_rules import RewardRules
from headrace_console.learning import (
    GateRule,
    describe_decision,
    describe_learning,
    describe_numbers,
    describe_rule,
    describe_trial,
    scored_versions,
)
from headrace_console.pages.loop import reward_chart
from headrace_console.sources.services import Progress, ServiceReport, StackReport, parse_samples
from headrace_schemas import ModelEvent
from headrace_schemas.http.registry_api import ModelState, SourceState, VersionState

NAMES = ("broker", "gateway", "inference", "collector", "scorer", "trainer", "registry")
TURNS = 'gateway_turns_total{model="m",purpose="train"} 40'


def facts(*samples: str, models: tuple[ModelState, ...] = (), **changes: object) -> Facts:
    """Return the facts of a ready stack with the metric samples `samples`, for example `collector_open_sessions 3`."""
    services = {name: ServiceReport(name, "ready") for name in NAMES}
    for name in NAMES:
        lines = [f"headrace_{sample}" for sample in samples if sample.startswith(f"{name}_")]
        services[name] = ServiceReport(name, "ready", samples=parse_samples("\n".join(lines)))
    for name in [name for name in changes if name in NAMES]:
        report = changes.pop(name)
        assert isinstance(report, ServiceReport)
        services[name] = report
    left_out = changes.pop("left_out", {})
    for name in left_out:  # type: ignore[attr-defined]
        del services[name]
    return Facts(StackReport(services, left_out), models, "http://h/v1", **changes)  # type: ignore[arg-type]


FAILING = ServiceReport(
    "scorer", "ready", sources=(SourceState(id="function:answer", failing=7, last_error="KeyError: 'answer'"),)
)
PAUSED = ServiceReport("collector", "ready", samples=parse_samples('headrace_consumer_paused{service="collector"} 1.0'))
CASES = [
    ("no_traffic", facts()),
    ("consumer_paused", facts(TURNS, collector=PAUSED)),
    ("service_not_started", facts(TURNS, left_out={"trainer": "trainer.base is not set"})),
    ("service_away", facts(TURNS, scorer=ServiceReport("scorer", "away"))),
    ("training_stopped", facts(TURNS, "trainer_stopped 1.0", "trainer_trained_total 9.0")),
    ("service_unready", facts(TURNS, trainer=ServiceReport("trainer", "unready", ("disk: full",)))),
    ("source_fails", facts(TURNS, scorer=FAILING)),
    (
        "rewards_awaited",
        facts(TURNS, "scorer_waiting_trajectories 5.0", rewards=RewardRules(required=("feedback",))),
    ),
    (
        "equal_rewards",
        facts(TURNS, "trainer_trained_total 64.0", 'trainer_measure{measure="zero_advantage_group_fraction"} 1.0'),
    ),
    (
        "no_advantage",
        facts(
            TURNS,
            "trainer_trained_total 4.0",
            'trainer_measure{measure="zero_advantage_fraction"} 1.0',
            'trainer_measure{measure="gradient_norm"} 0.0',
        ),
    ),
    ("batch_not_full", facts(TURNS, "trainer_waiting_experiences 3.0")),
    (
        "left_out",
        facts(TURNS, "collector_trajectories_total 9.0", 'collector_left_out_total{reason="truncated_sampling"} 9.0'),
    ),
    ("stale", facts(TURNS, 'trainer_dropped_total{reason="stale"} 9.0', "scorer_experiences_total 9.0")),
    ("dropped", facts(TURNS, 'trainer_dropped_total{reason="temperature"} 9.0')),
    ("sessions_open", facts(TURNS, "collector_open_sessions 4.0")),
    ("untrained_traffic", facts(TURNS, "collector_trajectories_total 4.0")),
    (
        "only_evaluations",
        facts('gateway_turns_total{model="m",purpose="eval"} 40', "collector_trajectories_total 4.0"),
    ),
    ("version_at_gate", facts(TURNS, models=(ModelState(id="m", revision=1, candidate="m@0123456789ab"),))),
    ("weights_went_back", facts(TURNS, "trainer_rewinds_total 1.0")),
]


def cause_of(observed: Facts) -> Cause:
    """Return the cause of missing training. Fail if there is none."""
    cause = find_cause(observed)
    assert cause is not None
    return cause


@pytest.mark.parametrize(("name", "observed"), CASES, ids=[name for name, _ in CASES])
def test_each_cause_is_named_with_a_remedy(name: str, observed: Facts) -> None:
    cause = cause_of(observed)
    assert cause.name == name, cause
    assert cause.sentence.strip()
    assert cause.remedy.strip()


def test_the_sentence_has_the_numbers_and_names_of_the_cause() -> None:
    causes = {name: cause_of(observed) for name, observed in CASES}
    assert "5 runs wait for rewards of feedback" in causes["rewards_awaited"].sentence
    assert "function:answer failed 7 times in a row: KeyError: 'answer'" in causes["source_fails"].sentence
    assert "truncated sampling 9" in causes["left_out"].sentence
    assert "temperature=0" in causes["left_out"].remedy
    assert causes["no_traffic"].command == 'llm = OpenAI(base_url="http://h/v1", api_key="none")'
    assert causes["service_not_started"].command == "headrace up --set trainer.base=FOLDER"


@pytest.mark.parametrize("reason", ["no_logprobs", "temperature"])
def test_greedy_calls_are_named_with_the_temperature_that_can_be_trained(reason: str) -> None:
    cause = cause_of(facts(TURNS, f'trainer_dropped_total{{reason="{reason}"}} 9.0'))
    assert cause.name == "dropped"
    assert "temperature=1" in cause.remedy


def test_a_stack_that_trains_has_no_cause_but_one_that_stops_it() -> None:
    assert find_cause(facts(TURNS, "collector_open_sessions 4.0", untrained_s=3.0)) is None
    assert find_cause(facts(TURNS, "collector_open_sessions 4.0", untrained_s=119.0)) is None
    assert cause_of(facts(TURNS, scorer=FAILING, untrained_s=3.0)).name == "source_fails"
    assert cause_of(facts(TURNS, "collector_open_sessions 4.0", untrained_s=500.0)).name == "sessions_open"
    assert cause_of(facts(TURNS, "trainer_stopped 1.0", untrained_s=3.0)).name == "training_stopped"


def test_drops_after_late_feedback_are_no_trouble() -> None:
    reasons = ("unchanged", "withdrawn", "superseded", "already_trained")
    dropped = [f'trainer_dropped_total{{reason="{reason}"}} 2.0' for reason in reasons]
    assert find_cause(facts(TURNS, *dropped)) is None
    assert cause_of(facts(TURNS, *dropped, 'trainer_dropped_total{reason="stale"} 1.0')).name == "stale"


OLD_TROUBLE = (TURNS, 'collector_left_out_total{reason="truncated_sampling"} 9.0', "trainer_trained_total 4.0")


def test_what_was_counted_before_training_last_advanced_is_no_cause() -> None:
    before = facts(*OLD_TROUBLE).stack
    assert cause_of(facts(*OLD_TROUBLE, before=before, untrained_s=500.0)).sentence.startswith("No call was captured")
    dropped = ('trainer_dropped_total{reason="stale"} 2.0', 'gateway_turns_total{model="m",purpose="train"} 44')
    assert cause_of(facts(*OLD_TROUBLE, *dropped, before=before, untrained_s=500.0)).name == "stale"


def test_counters_of_a_service_that_was_started_again_count_from_zero() -> None:
    before = facts('collector_left_out_total{reason="truncated_sampling"} 9.0').stack
    cause = cause_of(facts(TURNS, 'collector_left_out_total{reason="truncated_sampling"} 2.0', before=before))
    assert "truncated sampling 2" in cause.sentence


def test_weights_that_went_back_between_two_reports_are_named_although_experiences_were_trained_in_between() -> None:
    reports = [facts(TURNS, f"trainer_trained_total {n}", f"trainer_rewinds_total {n // 4}") for n in (0, 4, 4)]
    progress = Progress()
    for number, report in enumerate(reports):
        progress.note(report.stack, 2.0 * number)
    observed = replace(reports[2], before=progress.before, preceding=progress.preceding, untrained_s=500.0)
    assert cause_of(observed).name == "weights_went_back"
    later = [observed.stack, facts(TURNS, "trainer_trained_total 8", "trainer_rewinds_total 1").stack]
    for number, stack in enumerate(later):
        progress.note(stack, 6.0 + 2.0 * number)
    observed = replace(reports[2], before=progress.before, preceding=progress.preceding, untrained_s=500.0)
    assert cause_of(observed).name == "no_traffic"


@pytest.mark.parametrize("measures", [{"zero_advantage_fraction": 1, "gradient_norm": 0.1}, {"gradient_norm": 0}])
def test_a_step_that_changed_weights_is_not_named(measures: dict[str, float]) -> None:
    samples = [f'trainer_measure{{measure="{name}"}} {value}' for name, value in measures.items()]
    assert find_cause(facts(TURNS, *samples, untrained_s=3.0)) is None


def test_progress_remembers_the_report_in_which_training_advanced() -> None:
    progress = Progress()
    reports = [facts(TURNS, f"trainer_trained_total {number}").stack for number in (0, 4, 4)]
    progress.note(reports[0], 10.0)
    assert (progress.before, progress.untrained_s(11.0)) == (None, None)
    progress.note(reports[1], 12.0)
    progress.note(StackReport({}), 14.0)  # the trainer does not answer
    progress.note(reports[2], 16.0)
    assert progress.before is reports[1]
    assert progress.untrained_s(20.0) == 8.0


def test_progress_of_a_new_console_begins_with_what_was_trained_before_it() -> None:
    progress = Progress()
    progress.note(first := facts("trainer_trained_total 40").stack, 10.0)
    assert progress.before is first
    assert progress.untrained_s(20.0) is None


BEGAN = datetime(2026, 11, 26, 7, 0, tzinfo=UTC)


def version(step: int, score: float | None, error: float = 0.03, state: str = "promoted") -> VersionState:
    name, time = f"m@{step:012x}", BEGAN + timedelta(minutes=step)
    events = [ModelEvent(decision_id=f"p{step}", time=time, model="m", version=name, decision="promoted")]
    if score is not None:
        statistics = {"score": score, "tasks": 200.0, "score_standard_error": error}
        audit = ModelEvent(
            decision_id=f"e{step}", time=time, model="m", version=name, decision="evaluated", statistics=statistics
        )
        events.append(audit)
    return VersionState.model_validate(
        {
            "id": name,
            "model": "m",
            "lineage": "main",
            "step": step,
            "state": state,
            "registered_at": time,
            "decisions": tuple(events),
        }
    )


@pytest.mark.parametrize(
    ("scores", "verdict"),
    [
        ((0.46, 0.6, 0.79), "learns"),
        ((0.79, 0.46), "worse"),
        ((0.5, 0.55), "unclear"),
        ((0.5,), "unmeasured"),
        ((), "unmeasured"),
    ],
)
def test_learning_is_stated_only_where_the_interval_shows_it(scores: tuple[float, ...], verdict: str) -> None:
    versions = [version(step, score) for step, score in enumerate(scores)][::-1]
    champion = versions[0].id if versions else None
    assert describe_learning("m", champion, versions).verdict == verdict


def test_the_sentence_states_scores_versions_and_interval() -> None:
    versions = [version(step, score) for step, score in enumerate((0.46, None, 0.79))][::-1]
    described = describe_learning("m", versions[0].id, versions)
    assert described.sentence == "m learns: audit score 0.46 → 0.79 in 1 version (95 %: +0.25 to +0.41)."
    assert described.swapped_at == BEGAN + timedelta(minutes=2)


@pytest.mark.parametrize(
    ("scores", "sentence"),
    [
        ((None,), "m: no version has an audit score yet."),
        ((0.4,), "m: the first version is the champion (audit score 0.40)."),
        ((0.4, None), "m: only the first version has an audit score so far (audit score 0.40)."),
        (
            (0.46, 0.79, None),
            "m learns: audit score 0.46 → 0.79 in 1 version (95 %: +0.25 to +0.41). The champion is not scored yet.",
        ),
    ],
)
def test_the_sentence_names_what_is_not_scored_yet(scores: tuple[float | None, ...], sentence: str) -> None:
    versions = [version(step, score) for step, score in enumerate(scores)][::-1]
    assert describe_learning("m", versions[0].id, versions).sentence == sentence


def test_a_refused_version_does_not_stand_for_a_champion_without_a_score() -> None:
    versions = [version(2, None), version(1, 0.1, state="rejected"), version(0, 0.5)]
    assert describe_learning("m", versions[0].id, versions).verdict == "unmeasured"


@pytest.mark.parametrize(
    ("scores", "sentence"),
    [
        ((0.4, 0.8, 0.8, 0.79), ""),
        (
            (0.4, 0.6, 0.8, 0.8, 0.79, 0.8),
            "No rise in the last 3 versions (3 steps, 3 minutes): step 2 reached 0.80. Add tasks or a reward source "
            "that tells good answers from bad ones; the page Rewards shows which differ.",
        ),
        (
            (0.4, 0.95, 0.95, 0.95, 0.94),
            "No rise in the last 3 versions (3 steps, 3 minutes): step 1 reached 0.95. The score is near its maximum: "
            "add harder tasks if the agent must learn more.",
        ),
        ((0.4, 0.8, 0.8, 0.8, 0.8, 0.81), ""),
    ],
)
def test_a_model_that_learned_is_stated_not_to_rise_after_three_versions(
    scores: tuple[float, ...], sentence: str
) -> None:
    versions = [version(step, score) for step, score in enumerate(scores)][::-1]
    described = describe_learning("m", versions[0].id, versions)
    assert described.verdict == ("plateau" if sentence else "learns")
    assert described.sentence.partition("). ")[2] == sentence


def test_a_small_batch_names_the_open_sessions_that_it_waits_for() -> None:
    waiting = "trainer_waiting_experiences 3.0"
    few, open_sessions = (find_cause(facts(TURNS, waiting, *more)) for more in ((), ("collector_open_sessions 40.0",)))
    assert few is not None
    assert "send more calls" in few.remedy
    assert open_sessions is not None
    assert "40 sessions are open, and each is trained after its end" in open_sessions.remedy


@pytest.mark.parametrize("width", [0.004, 0.021, 0.45, 0.6, 1.0, 30.0])
def test_the_grid_of_a_chart_has_three_to_eight_different_labels(width: float) -> None:
    chart = interval_chart("x", [Mark(0, 0.351, 0.351, 0.351, ""), Mark(1, 0.351 + width, 0.351, 0.351 + width, "")])
    labels = re.findall(r'dominant-baseline="middle">([^<]+)<', chart)
    assert 3 <= len(labels) <= 8
    assert len(set(labels)) == len(labels)


def test_the_rule_has_the_numbers_of_the_settings() -> None:
    assert "no gate is set" in describe_rule(GateRule())
    rule = describe_rule(GateRule(command=("play",), margin=0.2, anchor_margin=0.03, alpha=0.01, minimum_score=0.4))
    assert "less than 0.2 worse than the champion and less than 0.03 worse than the anchor" in rule
    assert "less than 0.2 below the score 0.4" in rule
    assert "at most 0.01" in rule


def test_the_last_decision_of_the_gate_is_stated_with_its_numbers() -> None:
    assert describe_trial([version(1, 0.5)]) == ""
    numbers = {"tasks": 253.0, "difference": -0.1, "standard_error": 0.02, "margin": 0.05}
    time = BEGAN + timedelta(hours=1)
    refused = ModelEvent(
        decision_id="r", time=time, model="m", version="m@000000000002", decision="rejected", statistics=numbers
    )
    versions = [version(2, None).model_copy(update={"decisions": (refused,)}), version(1, 0.5)]
    audit = versions[1].decisions[-1]
    expected = "m@000000000002 was rejected after 253 tasks (-0.10 ± 0.04 against the champion, margin 0.05)."
    assert describe_trial(versions) == f"Last decision: {expected}"
    sentence = describe_decision(versions[0].model_copy(update={"decisions": (refused, audit)}))
    assert sentence == "m@000000000002 was refused after 253 tasks (-0.10 ± 0.04 against the champion, margin 0.05)"


@pytest.mark.parametrize(
    ("difference", "sentence"),
    [
        (0.0, "identical to the champion on every task, margin 0.05"),
        (0.25, "+0.25 against the champion, margin 0.05"),
    ],
)
def test_equal_differences_have_no_interval(difference: float, sentence: str) -> None:
    numbers = {"tasks": 9.0, "difference": difference, "standard_error": 0.0, "margin": 0.05}
    event = ModelEvent(
        decision_id="r", time=BEGAN, model="m", version="m@000000000002", decision="promoted", statistics=numbers
    )
    assert describe_numbers(event) == f"after 9 tasks ({sentence})"


def test_a_score_without_failures_has_an_interval() -> None:
    (scored,) = scored_versions([version(0, 1.0, error=0.0)])
    assert scored.lower < 1.0 == scored.upper


def test_a_chart_escapes_labels_and_draws_at_most_400_marks() -> None:
    marks = [Mark(x, 0.5, 0.4, 0.6, f"<script>{x}", hollow=x == 3) for x in range(1000)]
    chart = interval_chart('a "title"', marks, [Line(0.2, "<margin>")], below="x")
    assert chart.count("<circle") == 400
    assert "<script>" not in chart
    assert "<margin>" not in chart
    assert "style" not in chart
    assert interval_chart("nothing", []) == ""
    assert "<circle" in interval_chart("one", [Mark(0, 0.5, 0.5, 0.5, "")])
    assert interval_chart("not finite", [Mark(0, float("nan"), 0, 0, "")]) == ""


def test_the_reward_chart_has_a_mark_of_its_own_for_each_report() -> None:
    steps: list[Mapping[str, object]] = [
        {"account": 3, "step": 1, "reward": 0.25, "trained": 8, "version": None},
        {"account": 4, "step": 2, "reward": 0.5, "trained": 8, "version": "m@<b>"},
        {"account": 5, "step": 2, "reward": 0.75, "trained": 1, "version": None},
        {"account": 6, "step": 2, "reward": 0.75, "trained": 1, "version": None},
    ]
    chart = str(reward_chart("m", steps))
    positions = re.findall(r'<circle class="mark" cx="([0-9.]+)"', chart)
    assert len(set(positions)) == len(positions) == 4, "reports between two versions have the same step"
    assert "report 3, step 1: 0.250, mean of 8 trained revisions" in chart
    assert "report 4, step 2: 0.500, mean of 8 trained revisions, made m@&lt;b&gt;" in chart
    assert reward_chart("m", []) == ""
