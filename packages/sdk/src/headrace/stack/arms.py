"""Metrics of the sessions of an A/B test by arm, read from the bus. Needs the extra `headrace[topics]`."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping

from headrace.topics import Range, connected
from headrace_schemas import Reward, Turn

ARMS = {"control": "a", "candidate": "b"}
SUCCESS = 0.5
"""Mean reward from which a session counts as a success."""
RATERS = ("user", "feedback")


async def arm_means(bus: str, rollout: str) -> dict[str, dict[str, float]]:
    """Return means over the sessions of each arm.

    `accuracy` is the share of successes among the sessions with a reward, `latency` the duration of their calls in
    seconds, and `user_satisfaction` the mean of people's rewards. A metric without values is left out.
    """
    arm_of: dict[str, str] = {}
    latency: dict[str, list[float]] = defaultdict(list)
    newest: dict[tuple[str, str, str], Reward] = {}
    async with connected(bus) as topics:
        async for entry in topics.read(Range(Turn.topic)):
            turn = entry.event
            if isinstance(turn, Turn) and turn.assignment and rollout in turn.assignment.rollouts:
                arm = ARMS.get(turn.assignment.arm)
                if arm is not None:
                    arm_of[turn.session_key] = arm
                    latency[arm].append((turn.time - turn.started_at).total_seconds())
        async for entry in topics.read(Range(Reward.topic, keys=list(arm_of) or ["-"])):
            reward = entry.event
            if isinstance(reward, Reward):
                reward_key = reward.session_key, reward.source, reward.turn_id or ""
                if reward_key not in newest or newest[reward_key].revision <= reward.revision:
                    newest[reward_key] = reward
    successes, people = _rewards_by_arm(newest.values(), arm_of)
    values = {"accuracy": successes, "latency": latency, "user_satisfaction": people}
    return {
        arm: {name: math.fsum(by_arm[arm]) / len(by_arm[arm]) for name, by_arm in values.items() if by_arm[arm]}
        for arm in ARMS.values()
    }


def _rewards_by_arm(
    rewards: Iterable[Reward], arm_of: Mapping[str, str]
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return by arm whether each session with a reward was a success, and the rewards from people."""
    by_session: dict[str, list[float]] = defaultdict(list)
    people: dict[str, list[float]] = defaultdict(list)
    for reward in rewards:
        if reward.value is not None:
            by_session[reward.session_key].append(reward.value)
            if reward.source in RATERS:
                people[arm_of[reward.session_key]].append(reward.value)
    successes: dict[str, list[float]] = defaultdict(list)
    for key, values in by_session.items():
        successes[arm_of[key]].append(float(math.fsum(values) / len(values) >= SUCCESS))
    return successes, people
