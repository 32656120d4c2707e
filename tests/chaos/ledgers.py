"""Three independent ledgers, and the facts on which they must agree.

The client's ledger has the answers that arrived, the topics' ledger the captured turns and their outcomes, the
trainer's
ledger the experiences in its saved weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from headrace_operations.turn_account import TurnAccount
from tests.chaos.client import ClientLedger
from tests.chaos.facts import Facts

SHOWN = 5
"""Examples of each broken promise that the report names."""


@dataclass(frozen=True, slots=True)
class TrainerLedger:
    """The lineage's saved state, read from the blob store after everything has stopped."""

    lineage: str
    contributions: Mapping[str, tuple[int, ...]]
    """By experience: in which steps it changed the weights."""
    revisions: Mapping[str, tuple[int, ...]]
    waiting: frozenset[str]
    """Experiences that were read and are not trained yet."""
    steps: int


@dataclass(slots=True)
class Findings:
    """Result of the comparison. `broken` maps each broken promise to its offenders."""

    broken: dict[str, list[str]] = field(default_factory=dict)
    table: dict[str, int] = field(default_factory=dict)

    def check(self, promise: str, offenders: Iterable[str]) -> None:
        """Count the offenders against a promise; the promise holds without any."""
        sorted_offenders = sorted(offenders)
        self.table[promise] = len(sorted_offenders)
        if sorted_offenders:
            self.broken[promise] = sorted_offenders


LOST = "acked turns lost"
DOUBLE = "experiences trained twice within a lineage"
FAILED = "failed user requests"
VALUES = "feedback that counts with another value than its user's last word"


def compare(client: ClientLedger, topics: Facts, account: TurnAccount, trainer: TrainerLedger) -> Findings:
    """Compare all facts on which the ledgers must agree."""
    findings = Findings()
    _client_and_topics(findings, client, topics)
    _within_topics(findings, topics, account, trainer.lineage)
    _topics_and_trainer(findings, topics, trainer)
    return findings


def _client_and_topics(findings: Findings, client: ClientLedger, topics: Facts) -> None:
    findings.check(FAILED, client.failures)
    findings.check(LOST, client.acked.keys() - topics.turns.keys())
    both = client.acked.keys() & topics.turns.keys()
    for label, attribute in (("text", "content"), ("token ids", "tokens"), ("version", "version")):
        seen = {name: (getattr(client.acked[name], attribute), getattr(topics.turns[name], attribute)) for name in both}
        findings.check(
            f"turns whose {label} the user did not see",
            (
                f"{name}: {captured}, the user saw {received}"
                for name, (received, captured) in seen.items()
                if received != captured
            ),
        )
    findings.check("acked feedback lost", client.feedback_ids - topics.feedback)
    rewarded = {session for _, session, has_reward, _ in topics.newest.values() if has_reward}
    findings.check("judged sessions without a reward", client.judged.keys() - rewarded)
    findings.check(VALUES, _other_values(client, topics))


def _other_values(client: ClientLedger, topics: Facts) -> Iterable[str]:
    """Check that the last verdict counts in sessions with one gateway.

    With two gateways, a verdict that one of them acknowledged may wait in its spool while the bus receives the other,
    so the
    log decides the order. The value must still be one of the session's verdicts.
    """
    experiences = Counter(session for _, session, *_ in topics.newest.values())
    for _, session, has_reward, value in topics.newest.values():
        verdicts = client.judged.get(session)
        if not verdicts or not has_reward:
            continue
        allowed = {verdicts[-1].value} if len(client.reached[session]) == 1 else {verdict.value for verdict in verdicts}
        if value not in allowed:
            words = ", ".join(f"{verdict.value} at {verdict.gateway}" for verdict in verdicts)
            reached = ", ".join(sorted(client.reached[session]))
            yield f"session {session} of {experiences[session]} experiences: {value}, the user said {words}; {reached}"


def _within_topics(findings: Findings, topics: Facts, account: TurnAccount, lineage: str) -> None:
    findings.check(
        "turns in two trajectories",
        (turn for turn, trajectories in topics.trajectory_of.items() if len(trajectories) > 1),
    )
    findings.check("events repeated with other contents", topics.changed)
    findings.check(
        "trained tokens, logprobs or versions that are not the captured ones",
        (
            f"{turn} choice {choice}"
            for (turn, choice), digests in topics.spans.items()
            if digests != {topics.sampled.get((turn, choice))}
        ),
    )
    findings.check("dead letters", topics.letters)
    for label, names in topics.waiting(lineage).items():
        findings.check(f"left waiting: {label}", names)
    outcomes = topics.verdicts.get(lineage, {})
    findings.check(
        "verdicts on nothing", (name for name, revision in outcomes if (name, revision) not in topics.experiences)
    )
    findings.check("contradictions in the account of turns", account.problems)
    total = account.trained + sum(account.waiting.values()) + sum(account.dropped.values())
    gap = [f"{account.captured} captured, {total} accounted for"] if account.captured != total else []
    gap += (
        [f"{len(topics.turns)} turns, {account.captured} in the account"]
        if len(topics.turns) != account.captured
        else []
    )
    findings.check("turns missing from the account", gap)


def _topics_and_trainer(findings: Findings, topics: Facts, trainer: TrainerLedger) -> None:
    outcomes_by_revision = topics.verdicts.get(trainer.lineage, {})
    trained: Counter[str] = Counter()
    for (name, _), outcomes in outcomes_by_revision.items():
        trained[name] += outcomes.count(None)
    findings.check(DOUBLE, [*topics.trained_twice(), *_doubled(topics, trainer)])
    findings.check(
        "experiences in the weights that no report names",
        (name for name, steps in trainer.contributions.items() if len(steps) > trained[name]),
    )
    findings.check(
        "experiences reported as trained that the weights lack",
        (name for name, count in trained.items() if len(trainer.contributions.get(name, ())) < count),
    )
    findings.check("experiences left in the trainer's queue", trainer.waiting)


def _doubled(topics: Facts, trainer: TrainerLedger) -> list[str]:
    """An experience changes the weights at most once per revision unless that is queued again, and once per step."""
    return [
        f"experience {name} in steps {list(steps)} with revisions {list(trainer.revisions[name])}"
        for name, steps in trainer.contributions.items()
        if len(steps) > topics.trainings(trainer.lineage, name, trainer.revisions[name]) or len(set(steps)) < len(steps)
    ]
