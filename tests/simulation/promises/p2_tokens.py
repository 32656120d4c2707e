"""P2: the trained tokens are bit-equal to the sampled ones, with the engine's logprobs, and no others are trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_schemas import Branch, Experience, Trajectory
from tests.simulation.learner import tokens_digest
from tests.simulation.rest import lessons

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster
    from tests.simulation.promises.check import Check


def check(cluster: Cluster, that: Check) -> None:
    """From the turn that an agent made, by the trajectory, to the rows in the weights of every version."""
    for trajectory in cluster.log.all(Trajectory):
        for branch in trajectory.branches:
            _spans(cluster, branch, that)
    branches = {(lesson.experience_id, lesson.revision): lesson.branch for lesson in cluster.log.all(Experience)}
    digests = {name: _digest(branch) for name, branch in branches.items() if branch is not None}
    experience_ids = {experience_id for experience_id, _ in digests}
    for version, learned in lessons(cluster).items():
        for lesson in learned:
            # A withdrawal comes without tokens: those of an earlier revision are trained.
            expected = digests.get((lesson.experience_id, lesson.revision))
            earlier = {digest for (name, _), digest in digests.items() if name == lesson.experience_id}
            that(
                lesson.experience_id in experience_ids
                and lesson.tokens_sha256 in ({expected} if expected else earlier),
                f"{version} was trained on other tokens than {lesson.experience_id} has",
            )


def _spans(cluster: Cluster, branch: Branch, that: Check) -> None:
    for span in branch.spans:
        turn = cluster.ledger.requested.get(span.turn_id)
        if not that(turn is not None, f"turn {span.turn_id} was never made"):
            continue
        assert turn is not None
        choice = turn.choices[span.choice]
        that(branch.token_ids[: span.start] == turn.prompt_token_ids, f"prompt of {span.turn_id} differs")
        that(branch.token_ids[span.start : span.stop] == choice.token_ids, f"tokens of {span.turn_id} differ")
        that(span.logprobs == choice.logprobs, f"logprobs of {span.turn_id} differ")


def _digest(branch: Branch) -> str:
    behaviour = [0.0] * len(branch.token_ids)
    for span in branch.spans:
        behaviour[span.start : span.stop] = span.logprobs
    return tokens_digest(list(branch.token_ids), [bool(masked) for masked in branch.loss_mask], behaviour)
