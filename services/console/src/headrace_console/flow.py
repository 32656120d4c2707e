"""Diagnosis of missing training: the first cause that the observed facts show, with its remedy.

`find_cause` is a pure function. Causes that stop the whole loop are checked first, then those of single services in the
order of the loop. Counters are compared with their values when an experience was last trained, so that earlier problems
are not reported again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from headrace_console.flow_rules import (
    DROP_REMEDIES,
    LEFT_OUT_REMEDIES,
    ORDINARY_REASONS,
    BatchRules,
    RewardRules,
    remedy,
)
from headrace_console.sources.services import StackReport
from headrace_schemas.http.registry_api import ModelState

_LOOP = ("broker", "gateway", "inference", "collector", "scorer", "trainer", "registry")
_STALLED_AFTER_WAITS, _STALLED_AFTER_S_MIN = 4, 10.0
"""Training counts as stalled after four times `trainer.batch_wait_s` without a trained experience, at least 10 s."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Observed state of the loop at one moment, from which `find_cause` finds why nothing is trained."""

    stack: StackReport
    models: tuple[ModelState, ...] = ()
    base_url: str = ""
    untrained_s: float | None = None
    """Seconds since the number of trained experiences last rose; None if it has not risen since the console's start."""
    before: StackReport | None = None
    """Report with which that number last rose, or the console's first report. None if no experience was trained yet."""
    preceding: StackReport | None = None
    """Report that preceded the last rise of that number, or None."""
    idle_s: float = 300.0
    """Setting `collector.idle_s`."""
    rewards: RewardRules = field(default_factory=RewardRules)
    batches: BatchRules = field(default_factory=BatchRules)

    def value(self, service: str, metric: str, **labels: str) -> float:
        """Return the value of a metric that a service reported, or 0 if the service reported none."""
        return self.stack.service(service).value(metric, **labels) or 0.0

    def rise(self, service: str, metric: str, *, includes_training: bool = False) -> float:
        """Return the growth of a counter since `before`, or with `includes_training` since `preceding`.

        If the counter is lower now, its service was restarted, so the growth is the whole counter.
        """
        now, since = self.value(service, metric), (includes_training and self.preceding) or self.before
        earlier = (since.service(service).value(metric) or 0.0) if since is not None else 0.0
        return now - earlier if now >= earlier else now

    def rises(self, service: str, metric: str, *, label: str = "reason") -> dict[str, float]:
        """Return the growth of a counter since `before` for each value of one of its labels, without zero growths."""
        now = self.stack.service(service).by_label(metric, label)
        earlier = self.before.service(service).by_label(metric, label) if self.before is not None else {}
        growth = {name: value - earlier.get(name, 0.0) for name, value in now.items()}
        return {name: now[name] if value < 0 else value for name, value in growth.items() if value}

    @property
    def trained(self) -> float:
        """Number of experience revisions trained since the trainer started."""
        return self.value("trainer", "headrace_trainer_trained_total")

    @property
    def trains(self) -> bool:
        """Whether an experience was trained so recently that training does not count as stalled."""
        stalled_after_s = max(_STALLED_AFTER_S_MIN, _STALLED_AFTER_WAITS * self.batches.batch_wait_s)
        return self.untrained_s is not None and self.untrained_s < stalled_after_s


@dataclass(frozen=True, slots=True)
class Cause:
    """A reason why nothing is trained. `name` is a stable identifier; sentence and remedy are texts for people."""

    name: str
    sentence: str
    remedy: str
    command: str = ""
    """A command or a line of code that carries the remedy out."""


def find_cause(facts: Facts) -> Cause | None:
    """Return the first cause in the order of the checks that `facts` show, or None.

    None means that experiences are being trained and nothing stops the loop, or that no check recognizes the cause.
    """
    for check in _STOPPING:
        if (cause := check(facts)) is not None:
            return cause
    if facts.trains:
        return None
    return next((cause for check in _STALLING if (cause := check(facts)) is not None), None)


def _paused_consumer(facts: Facts) -> Cause | None:
    for name, service in facts.stack.services.items():
        if service.value("headrace_consumer_paused"):
            return Cause(
                "consumer_paused",
                f"The {name} is paused: it refused so many records that it may be broken itself.",
                f"Read why the records were refused, fix the cause and restart the {name}.",
                "headrace dead-letters list",
            )
    return None


def _no_traffic(facts: Facts) -> Cause | None:
    if facts.stack.calls != 0 or facts.trained:
        return None
    earlier = ("headrace_collector_open_sessions", "headrace_collector_trajectories_total")
    if any(facts.value("collector", metric) for metric in earlier):
        return None
    return Cause(
        "no_traffic",
        "No call was captured since the gateway started.",
        "Change the one line of your agent:",
        f'llm = OpenAI(base_url="{facts.base_url}", api_key="none")',
    )


def _service_away(facts: Facts) -> Cause | None:
    for name in _LOOP:
        if name in facts.stack.left_out and name != "broker":
            reason = facts.stack.left_out[name]
            return Cause(
                "service_not_started",
                f"The {name} is not started: {reason}.",
                "Set what is missing, and start the stack again.",
                f"headrace up --set {name}.base=FOLDER" if reason == "trainer.base is not set" else "",
            )
        service = facts.stack.services.get(name)
        if service is not None and service.status == "away":
            return Cause(
                "service_away",
                f"The {name} does not answer.",
                "Read its log; the supervisor starts it again when it ends.",
                f"headrace logs {name}",
            )
    return None


def _stopped_trainer(facts: Facts) -> Cause | None:
    if not facts.value("trainer", "headrace_trainer_stopped"):
        return None
    return Cause(
        "training_stopped",
        "Training is stopped: a limit of its health was passed.",
        "Read which limit in the trainer's log, correct the reward or the learning rate, and restart the trainer.",
        "headrace logs trainer",
    )


def _unserved_model(facts: Facts) -> Cause | None:
    for model in facts.models:
        if model.trouble and model.champion is None:
            return Cause("no_version", f"{model.trouble}.", "No call can be answered until a version serves.")
    return None


def _unready_service(facts: Facts) -> Cause | None:
    for name in _LOOP:
        service = facts.stack.services.get(name)
        if service is not None and service.status == "unready":
            problems = "; ".join(service.problems) or "it states no reason"
            return Cause(
                "service_unready", f"The {name} is not ready: {problems}.", "Read its log.", f"headrace logs {name}"
            )
    return None


def _failing_source(facts: Facts) -> Cause | None:
    for name in ("scorer", "judge"):
        for source in facts.stack.service(name).sources:
            if source.failing:
                return Cause(
                    "source_fails",
                    f"The reward source {source.id} failed {source.failing} times in a row: {source.last_error}",
                    "Correct the function or the endpoint. Runs that still wait are scored again after a restart.",
                    f"headrace logs {name}",
                )
    return None


def _left_out(facts: Facts) -> Cause | None:
    reasons = facts.rises("collector", "headrace_collector_left_out_total")
    unsampled = facts.rises("trainer", "headrace_trainer_dropped_total")
    if _waiting(facts) or not reasons or any(reason != "temperature" for reason in unsampled):
        return None
    reason = max(reasons, key=lambda name: reasons[name])
    return Cause(
        "left_out",
        f"Turns were left out of training: {_counts(reasons)}.",
        remedy(reason, LEFT_OUT_REMEDIES),
    )


def _awaited_rewards(facts: Facts) -> Cause | None:
    waiting = facts.value("scorer", "headrace_scorer_waiting_trajectories")
    if not waiting or facts.value("trainer", "headrace_trainer_waiting_experiences"):
        return None
    sources = ", ".join((*facts.rewards.required, *facts.rewards.expected)) or "a reward function or feedback"
    runs = _plural(waiting, "run waits", "runs wait")
    return Cause(
        "rewards_awaited",
        f"{runs} for rewards of {sources}, at most {facts.rewards.reward_wait_s:g} s.",
        "Send the missing rewards, or name fewer sources in scorer.required and scorer.expected.",
    )


def _equal_rewards(facts: Facts) -> Cause | None:
    if facts.value("trainer", "headrace_trainer_measure", measure="zero_advantage_group_fraction") < 1:
        return None
    return Cause(
        "equal_rewards",
        "All runs of each task had equal rewards in the last step, so the step had nothing to learn from.",
        "Use tasks that the agent solves sometimes, and a reward that differs between good and bad runs.",
    )


def _no_advantage(facts: Facts) -> Cause | None:
    measure = "headrace_trainer_measure"
    gradient_norm = facts.stack.service("trainer").value(measure, measure="gradient_norm")
    if gradient_norm != 0 or facts.value("trainer", measure, measure="zero_advantage_fraction") < 1:
        return None
    return Cause(
        "no_advantage",
        "The last step changed no weights: no run differed in its reward from another run of its task.",
        "Play each task several times, or send calls without a task id, which are compared with all runs.",
    )


def _dropped(facts: Facts) -> Cause | None:
    rises = facts.rises("trainer", "headrace_trainer_dropped_total")
    reasons = {reason: number for reason, number in rises.items() if reason not in ORDINARY_REASONS}
    if _waiting(facts) or not reasons:
        return None
    reason = max(reasons, key=lambda name: reasons[name])
    return Cause(
        "stale" if reason == "stale" else "dropped",
        f"The trainer dropped experiences: {_counts(reasons)}{' since it last trained' if facts.trained else ''}.",
        remedy(reason, DROP_REMEDIES),
    )


def _small_batch(facts: Facts) -> Cause | None:
    waiting = facts.value("trainer", "headrace_trainer_waiting_experiences")
    rules = facts.batches
    if not waiting or waiting >= rules.batch_experiences:
        return None
    few = waiting < rules.experiences_after_wait
    sessions = facts.value("collector", "headrace_collector_open_sessions")
    more = (
        f"{_plural(sessions, 'session is', 'sessions are')} open, and each is trained after its end (collector.idle_s "
        f"= {facts.idle_s:g})"
        if sessions
        else "send more calls"
    )
    return Cause(
        "batch_not_full",
        f"{_plural(waiting, 'experience waits', 'experiences wait')} for a batch of {rules.batch_experiences}.",
        f"A step needs {rules.experiences_after_wait} of them after {rules.batch_wait_s:g} s: {more}, or "
        "lower trainer.batch_experiences_min."
        if few
        else f"The next step is taken within {rules.batch_wait_s:g} s.",
    )


def _open_sessions(facts: Facts) -> Cause | None:
    sessions = facts.value("collector", "headrace_collector_open_sessions")
    if not sessions or _waiting(facts):
        return None
    return Cause(
        "sessions_open",
        f"{_plural(sessions, 'session is', 'sessions are')} open. A session is trained after its end.",
        f"End sessions by a call or by feedback, or wait: each ends after {facts.idle_s:g} s without a call "
        "(collector.idle_s).",
    )


def _version_at_gate(facts: Facts) -> Cause | None:
    for model in facts.models:
        if model.candidate is not None:
            return Cause(
                "version_at_gate",
                f"{model.candidate} is at the gate, which plays held-out tasks with it.",
                "Wait for the decision; it is listed with the version.",
            )
    return None


def _rewound(facts: Facts) -> Cause | None:
    # A gate of a few seconds refuses a version before the report with its training is read.
    count = facts.rise("trainer", "headrace_trainer_rewinds_total", includes_training=True)
    if not count:
        return None
    return Cause(
        "weights_went_back",
        f"The weights went back {_plural(count, 'time', 'times')}, because the registry refused their version.",
        "Read why the version was refused.",
    )


def _only_untrained_traffic(facts: Facts) -> Cause | None:
    if not facts.rise("collector", "headrace_collector_trajectories_total"):
        return None
    if facts.rise("scorer", "headrace_scorer_experiences_total") or _waiting(facts):
        return None
    turns = facts.rises("gateway", "headrace_gateway_turns_total", label="purpose")
    since = "since an experience was last trained" if facts.trained else "so far"
    if turns.keys() == {"eval"}:
        return Cause(
            "only_evaluations",
            f"Only evaluations were captured {since}: the gate's plays, or calls with purpose=eval.",
            "Let the agent work, and check that its calls are not marked with purpose=eval.",
        )
    return Cause(
        "untrained_traffic",
        f"Sessions have ended, and none {since} became an experience: {turns.get('eval', 0):,.0f} of "
        f"{sum(turns.values()):,.0f} calls were evaluations (the gate's plays, or calls with purpose=eval). The others "
        "were answered by a version that nobody trains, or their sessions have not ended.",
        "Let the agent work, and call the trained model without purpose=eval.",
    )


def _idle_agent(facts: Facts) -> Cause | None:
    if facts.before is None or facts.rise("gateway", "headrace_gateway_turns_total") or _waiting(facts):
        return None
    return Cause(
        "no_traffic",
        "No call was captured since an experience was last trained.",
        "Let the agent work, and check that it calls this gateway:",
        f'llm = OpenAI(base_url="{facts.base_url}", api_key="none")',
    )


_STOPPING: tuple[Callable[[Facts], Cause | None], ...] = (
    _paused_consumer,
    _service_away,
    _stopped_trainer,
    _unserved_model,
    _unready_service,
    _failing_source,
    _no_traffic,
    _equal_rewards,
    _no_advantage,
)
"""Causes that are named even if experiences were trained a moment ago."""
_STALLING: tuple[Callable[[Facts], Cause | None], ...] = (
    _awaited_rewards,
    _small_batch,
    _left_out,
    _dropped,
    _open_sessions,
    _only_untrained_traffic,
    _version_at_gate,
    _rewound,
    _idle_agent,
)


def _waiting(facts: Facts) -> bool:
    """Return whether runs wait for rewards or experiences wait for a batch."""
    return bool(
        facts.value("scorer", "headrace_scorer_waiting_trajectories")
        or facts.value("trainer", "headrace_trainer_waiting_experiences")
    )


def _counts(numbers: Mapping[str, float]) -> str:
    ordered = sorted(numbers.items(), key=lambda item: -item[1])
    return ", ".join(f"{name.replace('_', ' ')} {number:,.0f}" for name, number in ordered)


def _plural(number: float, singular: str, plural: str) -> str:
    return f"{number:,.0f} {singular if number == 1 else plural}"
