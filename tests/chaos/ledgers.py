"""Three ledgers that know nothing of each other, and what they must agree on.

The client's: which answers arrived. The topics': what was captured and what became of it. The trainer's: which
experiences its saved weights hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from headrace_cli.turn_account import TurnAccount
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
    """What the comparison found. `broken` maps each broken promise to what breaks it."""

    broken: dict[str, list[str]] = field(default_factory=dict)
    table: dict[str, int] = field(default_factory=dict)

    def check(self, promise: str, offenders: Iterable[str]) -> None:
        """Count the offenders against a promise; none is what is wanted."""
        found = sorted(offenders)
        self.table[promise] = len(found)
        if found:
            self.broken[promise] = found


LOST = "acked turns lost"
DOUBLE = "experiences trained twice within a lineage"
FAILED = "failed user requests"
VALUES = "feedback that counts with another value than its user's last word"


def compare(client: ClientLedger, topics: Facts, account: TurnAccount, trainer: TrainerLedger) -> Findings:
    """Everything that the three ledgers must agree on."""
    findings = Findings()
    _client_and_topics(findings, client, topics)
    _within_topics(findings, topics, account, trainer.lineage)
    _topics_and_trainer(findings, topics, trainer)
    return findings


def _client_and_topics(findings: Findings, client: ClientLedger, topics: Facts) -> None:
    findings.check(FAILED, client.failures)
    findings.check(LOST, client.acked.keys() - topics.turns.keys())
    both = client.acked.keys() & topics.turns.keys()
    for what, attribute in (("text", "content"), ("token ids", "tokens"), ("version", "version")):
        seen = {name: (getattr(client.acked[name], attribute), getattr(topics.turns[name], attribute)) for name in both}
        findings.check(
            f"turns whose {what} the user did not see",
            (
                f"{name}: {captured}, the user saw {shown}"
                for name, (shown, captured) in seen.items()
                if shown != captured
            ),
        )
    findings.check("acked feedback lost", client.told - topics.feedback)
    rewarded = {session for _, session, has_reward, _ in topics.newest.values() if has_reward}
    findings.check("judged sessions without a reward", client.judged.keys() - rewarded)
    findings.check(VALUES, _other_values(client, topics))


def _other_values(client: ClientLedger, topics: Facts) -> Iterable[str]:
    """The last word counts, where one gateway heard all of a session.

    Where two did, what the one has acknowledged may wait in its spool while the bus hears the other: which word came
    last, and which run it is about, is what the log says then. It has to be one of the session's words all the same.
    """
    experiences = Counter(session for _, session, *_ in topics.newest.values())
    for _, session, has_reward, value in topics.newest.values():
        said = client.judged.get(session)
        if not said or not has_reward:
            continue
        allowed = {said[-1].value} if len(client.reached[session]) == 1 else {one.value for one in said}
        if value not in allowed:
            words = ", ".join(f"{one.value} at {one.gateway}" for one in said)
            reached = ", ".join(sorted(client.reached[session]))
            yield f"session {session} of {experiences[session]} experiences: {value}, the user said {words}; {reached}"


def _within_topics(findings: Findings, topics: Facts, account: TurnAccount, lineage: str) -> None:
    findings.check(
        "turns in two trajectories", (turn for turn, found in topics.trajectory_of.items() if len(found) > 1)
    )
    findings.check("events repeated with other contents", topics.changed)
    findings.check(
        "trained tokens, logprobs or versions that are not the captured ones",
        (
            f"{turn} choice {choice}"
            for (turn, choice), held in topics.spans.items()
            if held != {topics.sampled.get((turn, choice))}
        ),
    )
    findings.check("dead letters", topics.letters)
    for what, names in topics.waiting(lineage).items():
        findings.check(f"left waiting: {what}", names)
    told = topics.verdicts.get(lineage, {})
    findings.check(
        "verdicts on nothing", (name for name, revision in told if (name, revision) not in topics.experiences)
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
    told = topics.verdicts.get(trainer.lineage, {})
    trained: Counter[str] = Counter()
    for (name, _), outcomes in told.items():
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
