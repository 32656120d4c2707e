"""Tests that the comparison of ledgers reports each injected fault, and reports none for consistent ledgers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from headrace_schemas import (
    Branch,
    Event,
    Experience,
    Feedback,
    RevertedOutcome,
    RewardPart,
    Span,
    TrainingMetrics,
    TrainingOutcome,
    Trajectory,
    Turn,
)
from headrace_schemas.values.base import utcnow
from tests.chaos.client import Acked, ClientLedger, Verdict, digest, tokens_digest
from tests.chaos.ledgers import DOUBLE, FAILED, LOST, VALUES, Facts, Findings, TrainerLedger, compare
from tests.support.turns import ask, feedback, user

LINEAGE = "main"
TRAINED = "trained tokens, logprobs or versions that are not the captured ones"


class World:
    """A session with one turn that was answered, rated and trained, as each ledger records it."""

    def __init__(self) -> None:
        self.turn: Turn = ask([user("who?")], "Ada", session="s")
        self.feedback: Feedback = feedback("s", value=1.0)
        prompt, first = self.turn.prompt_token_ids, self.turn.choices[0]
        span = Span(start=len(prompt), logprobs=first.logprobs, turn_id=self.turn.turn_id, version=self.turn.version)
        branch = Branch(token_ids=(*prompt, *first.token_ids), spans=(span,))
        self.trajectory = Trajectory(
            time=utcnow(), trajectory_id="t", session_key=self.turn.session_key, session_id="s", model=self.turn.model,
            branches=(branch,), end_reason="end_call", started_at=self.turn.started_at,
        )  # fmt: skip
        self.experience = Experience(
            time=utcnow(), experience_id=Experience.id_of("t", 0), trajectory_id="t", session_key=self.turn.session_key,
            session_id="s", model=self.turn.model, branch=branch, turn_ids=(self.turn.turn_id,), reward=1.0,
            parts=(RewardPart(source="feedback", value=1.0, weight=1.0),),
        )  # fmt: skip
        self.report = self.reported(0)
        self.client = ClientLedger()
        tokens = tokens_digest(prompt, first.token_ids)
        self.client.acked[self.turn.turn_id] = Acked("s", digest("Ada"), tokens, self.turn.version)
        self.client.feedback_ids.add(self.feedback.event_id)
        self.client.judged["s"] = [Verdict(1.0, "g")]
        self.client.reached["s"] = {"g"}
        name = self.experience.experience_id
        self.trainer = TrainerLedger(LINEAGE, {name: (1,)}, {name: (0,)}, frozenset(), steps=1)

    def reported(self, account: int, dropped: str | None = None) -> TrainingMetrics:
        told = {"experience_id": self.experience.experience_id, "revision": 0, "turn_ids": (self.turn.turn_id,)}
        verdict = TrainingOutcome.model_validate({**told, "dropped": dropped})
        return TrainingMetrics(
            time=utcnow(), model=self.turn.model, lineage=LINEAGE, step=0, account=account, verdicts=(verdict,)
        )

    def compare(self, *without: Event, more: Sequence[Event] = ()) -> Findings:
        """Return the findings for all events except `without`, plus the events `more`."""
        topics = Facts()
        events = (self.turn, self.feedback, self.trajectory, self.experience, self.report)
        for event in (*(one for one in events if one not in without), *more):
            topics.add(event)
        return compare(self.client, topics, topics.account.close(), self.trainer)


def test_where_all_is_well_nothing_is_found() -> None:
    world = World()
    findings = world.compare()
    assert findings.broken == {}
    assert findings.table[LOST] == findings.table[DOUBLE] == findings.table[FAILED] == 0


def test_what_is_queued_again_may_be_trained_again() -> None:
    world = World()
    name = world.experience.experience_id
    undone = (RevertedOutcome(experience_id=name, revision=0, queued=True),)
    world.trainer = replace(world.trainer, contributions={name: (1, 2)})
    back = world.reported(1).model_copy(update={"verdicts": (), "undone": undone})
    assert world.compare(more=[back, world.reported(2)]).broken == {}


def test_a_word_that_waited_in_another_gateways_spool_may_count() -> None:
    world = World()
    world.client.judged["s"] = [Verdict(1.0, "g"), Verdict(0.0, "g")]
    world.client.reached["s"] = {"g", "h"}
    assert world.compare().broken == {}


def test_what_nobody_said_never_counts() -> None:
    world = World()
    world.client.judged["s"] = [Verdict(0.5, "g"), Verdict(0.0, "g")]
    world.client.reached["s"] = {"g", "h"}
    assert VALUES in world.compare().broken


def test_redelivery_is_no_contradiction() -> None:
    world = World()
    by_its_client = world.feedback.model_copy(update={"time": utcnow()})
    again = (world.turn, world.trajectory, world.experience, world.report, by_its_client)
    assert world.compare(more=again).broken == {}


def lost_turn(world: World) -> Findings:
    world.client.acked["chatcmpl-gone"] = Acked("s", digest("Bob"))
    return world.compare()


def lost_feedback(world: World) -> Findings:
    return world.compare(world.feedback)


def feedback_without_effect(world: World) -> Findings:
    last = {"revision": 1, "reward": None, "no_reward": "withdrawn"}
    return world.compare(more=[world.experience.model_copy(update=last)])


def other(**changes: str) -> Callable[[World], Findings]:
    def plant(world: World) -> Findings:
        name = world.turn.turn_id
        world.client.acked[name] = replace(world.client.acked[name], **changes)
        return world.compare()

    return plant


def other_span(**changes: object) -> Callable[[World], Findings]:
    def plant(world: World) -> Findings:
        branch = world.experience.branch
        assert branch is not None
        span = branch.spans[0].model_copy(update=changes)
        changed = world.experience.model_copy(update={"branch": branch.model_copy(update={"spans": (span,)})})
        return world.compare(world.experience, more=[changed])

    return plant


def other_token(world: World) -> Findings:
    branch = world.experience.branch
    assert branch is not None
    tokens = (*branch.token_ids[:-1], branch.token_ids[-1] + 1)
    changed = world.experience.model_copy(update={"branch": branch.model_copy(update={"token_ids": tokens})})
    return world.compare(world.experience, more=[changed])


def earlier_word(world: World) -> Findings:
    world.client.judged["s"] = [Verdict(1.0, "g"), Verdict(0.0, "g")]
    return world.compare()


def failed_request(world: World) -> Findings:
    world.client.failed("status 503", "somewhere")
    return world.compare()


def trained_twice_by_report(world: World) -> Findings:
    return world.compare(more=[world.reported(1)])


def trained_twice_in_the_weights(world: World) -> Findings:
    world.trainer = replace(world.trainer, contributions={world.experience.experience_id: (1, 2)})
    return world.compare()


def trained_twice_in_one_step(world: World) -> Findings:
    name = world.experience.experience_id
    world.trainer = replace(world.trainer, contributions={name: (1, 1)}, revisions={name: (0, 1)})
    return world.compare()


def trained_without_a_report(world: World) -> Findings:
    return world.compare(world.report)


def reported_without_effect(world: World) -> Findings:
    world.trainer = replace(world.trainer, contributions={world.experience.experience_id: ()})
    return world.compare()


def forgotten(world: World) -> Findings:
    world.trainer = replace(world.trainer, contributions={})
    return world.compare()


def stuck_session(world: World) -> Findings:
    world.trainer = replace(world.trainer, contributions={})
    return world.compare(world.trajectory, world.experience, world.report)


def stuck_experience(world: World) -> Findings:
    name = world.experience.experience_id
    world.trainer = replace(world.trainer, contributions={name: ()}, waiting=frozenset([name]))
    return world.compare(world.report)


def two_trajectories(world: World) -> Findings:
    return world.compare(more=[world.trajectory.model_copy(update={"trajectory_id": "t2"})])


def changed_content(world: World) -> Findings:
    return world.compare(more=[world.trajectory.model_copy(update={"end_reason": "idle"})])


@pytest.mark.parametrize(
    ("plant", "promise"),
    [
        (lost_turn, LOST),
        (lost_feedback, "acked feedback lost"),
        (feedback_without_effect, "judged sessions without a reward"),
        (other(content=digest("Eve")), "turns whose text the user did not see"),
        (other(tokens=tokens_digest([1], [2])), "turns whose token ids the user did not see"),
        (other(version="m@ffffffffffffffff"), "turns whose version the user did not see"),
        (other_span(version="m@ffffffffffffffff"), TRAINED),
        (other_span(logprobs=(-9.0,)), TRAINED),
        (other_token, TRAINED),
        (earlier_word, VALUES),
        (failed_request, FAILED),
        (trained_twice_by_report, DOUBLE),
        (trained_twice_in_the_weights, DOUBLE),
        (trained_twice_in_one_step, DOUBLE),
        (trained_without_a_report, "experiences in the weights that no report names"),
        (reported_without_effect, "experiences reported as trained that the weights lack"),
        (forgotten, "experiences reported as trained that the weights lack"),
        (stuck_session, "left waiting: turns for the end of their session"),
        (stuck_experience, "left waiting: experiences for training"),
        (two_trajectories, "turns in two trajectories"),
        (changed_content, "events repeated with other contents"),
    ],
)
def test_what_is_planted_is_found(plant: Callable[[World], Findings], promise: str) -> None:
    assert promise in plant(World()).broken
