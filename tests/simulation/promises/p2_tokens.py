"""P2: the trained tokens are bit-equal to the sampled ones, with the engine's logprobs, and nothing else is trained."""

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
    branches = {(one.experience_id, one.revision): one.branch for one in cluster.log.all(Experience)}
    digests = {name: _digest(branch) for name, branch in branches.items() if branch is not None}
    known = {experience_id for experience_id, _ in digests}
    for version, learned in lessons(cluster).items():
        for one in learned:
            # A withdrawal comes without tokens: those of an earlier revision are trained.
            wanted = digests.get((one.experience_id, one.revision))
            earlier = {digest for (name, _), digest in digests.items() if name == one.experience_id}
            that(
                one.experience_id in known and one.tokens_sha256 in ({wanted} if wanted else earlier),
                f"{version} was trained on other tokens than {one.experience_id} has",
            )


def _spans(cluster: Cluster, branch: Branch, that: Check) -> None:
    for span in branch.spans:
        turn = cluster.ledger.asked.get(span.turn_id)
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
    return tokens_digest(list(branch.token_ids), [bool(one) for one in branch.loss_mask], behaviour)
