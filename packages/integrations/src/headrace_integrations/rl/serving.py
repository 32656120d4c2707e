"""`HotUpdater`, `ModelManager` and `ABTestFramework` with the interfaces of the article.

The registry makes the decisions and stores the state.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from headrace import rollouts
from headrace.blocking import blocking
from headrace.errors import Unreachable, UsageError
from headrace.topics import Range, connected
from headrace_integrations.practice.collecting import collect_run
from headrace_integrations.practice.runs import text_of
from headrace_integrations.stack import current
from headrace_operations.arguments import check_names, real_number, whole_number
from headrace_schemas import Reward, Turn
from headrace_schemas.http.registry_api import ModelState
from headrace_schemas.values.text import printable

_WAIT_S = 300.0
_DAY_S = 86_400.0
_ROUNDING = 1e-6
log = logging.getLogger("headrace.rl")


class HotUpdater:
    """Updates a serving agent to new versions on request. The model is paused until `close`, so that new versions wait.

    Args:
        update_config: `strategy` is "rolling" or "canary". `canary_ratio` is the share of live sessions in a canary;
            with "rolling" it has no effect, and a warning is logged. `check_after_updates` is the number of versions
            newer than the champion that `has_new_model` waits for.
    """

    def __init__(self, agent: Any, update_config: Mapping[str, Any] | None = None) -> None:
        config: dict[str, Any] = {"strategy": "rolling", "canary_ratio": 0.1, "check_after_updates": 1}
        check_names("update_config", update_config or {}, list(config))
        config |= dict(update_config or {})
        if config["strategy"] not in ("rolling", "canary"):
            value = printable(repr(config["strategy"]))
            raise UsageError(f"update_config.strategy = {value}: must be rolling or canary")
        if config["strategy"] == "rolling" and "canary_ratio" in (update_config or {}):
            log.warning("update_config.canary_ratio: has no effect with strategy rolling; live sessions get no share")
        self.agent, self.strategy, self.stack = agent, config["strategy"], current()
        self.tested: str | None = None
        every = whole_number("update_config.check_after_updates", config["check_after_updates"])
        self._updater = rollouts.HotUpdater(
            self.stack.model,
            self.stack.registry,
            share_of(config["canary_ratio"], "update_config.canary_ratio"),
            every,
            _WAIT_S,
        )
        self.stack.registry.pause(self.stack.model, reason="a program decides about updates")

    def has_new_model(self) -> bool:
        return self._updater.has_new_model()

    def test_canary(self, test_cases: Sequence[Any]) -> dict[str, float]:
        """Send test cases to the newest version, which no user calls yet, and return its success rate.

        A case is a question, or {"question", "check"}, where `check` is a function of the answer or a text that the
        answer must contain. For a question without a check, any text is a success.
        """
        self.tested = self._updater.newer()[0].id
        blocking(self.stack.hold(self.tested))
        passed = [self._passes(case) for case in test_cases]
        return {"success_rate": sum(passed) / len(passed), "cases": float(len(passed))}

    def rollout_update(self) -> str:
        """Make the tested (or else the newest) version champion, and return it.

        With the strategy "canary" this happens only after a canary on live traffic.
        """
        version = self.tested or self._updater.newer()[0].id
        if self.strategy == "canary" and not self._updater.test_canary(version):
            raise UsageError(f"{version}: its canary did not pass; see `headrace rollouts`")
        if self.strategy == "canary":
            self._updater.rollout_update(version)
        else:
            self.stack.registry.promote(self.stack.model, version, force=True)
        blocking(self.stack.until_serving(version, _WAIT_S))
        return version

    def rollback(self) -> str | None:
        """Withdraw the tested version, and return the version that serves. If the tested version is champion, the
        previous champion serves again."""
        champion = self.stack.registry.model(self.stack.model).champion
        if self.tested is None or self.tested == champion:
            return self._updater.rollback("requested by a program")
        self.stack.registry.withdraw(self.stack.model, self.tested, reason="it failed its test cases")
        return champion

    def close(self) -> None:
        """Resume automatic changes of the model, which this updater has paused."""
        self.stack.registry.resume(self.stack.model, reason="the program has ended")

    def _passes(self, case: Any) -> bool:
        question, check = case, None
        if isinstance(case, Mapping):
            check_names("test_cases", case, ("question", "check"))
            question, check = case["question"], case.get("check")
        _, agent_answer = collect_run(self.agent, str(question), purpose="eval", model=self.tested)
        answer = text_of(agent_answer)
        is_success: Callable[[str], bool] = (
            check if callable(check) else lambda text: bool(text) and str(check or "") in text
        )
        return bool(is_success(answer))


class ModelManager(rollouts.ModelManager):
    """Registry of the named versions of the entered stack's model.

    Args:
        checkpoint_dir: data directory of a private stack, whose blob store contains the versions. A running stack has a
            data directory of its own.
    """

    def __init__(self, checkpoint_dir: str | None = None) -> None:
        stack = current()
        if checkpoint_dir and (stack.data_dir is None or Path(checkpoint_dir).absolute() != stack.data_dir.absolute()):
            folder = stack.data_dir or "its own data directory"
            raise UsageError(
                f"checkpoint_dir = {checkpoint_dir!r}: this stack keeps its versions in {folder}; "
                "leave checkpoint_dir out"
            )
        super().__init__(stack.model, stack.registry)

    def create_ab_test(self, version_a: str, version_b: str, traffic_ratio: Any = "1/2") -> ModelState:
        """Start an A/B test.

        Args:
            traffic_ratio: {"v1.0": 0.7, "v1.1": 0.3}, or the share of version B, which is at most a half.
        """
        ratio = traffic_ratio
        if isinstance(traffic_ratio, Mapping):
            ratio = share_of_two("traffic_ratio", traffic_ratio, (version_a, version_b))
        return super().create_ab_test(version_a, version_b, share_of(ratio))


class ABTestFramework:
    """A/B test of two versions on live traffic; `model_a` must be the champion. Results are means over the sessions of
    each arm."""

    def __init__(
        self, model_a: str, model_b: str, traffic: Mapping[str, float], metrics: Sequence[str] = tuple(rollouts.METRICS)
    ) -> None:
        unknown = set(metrics) - set(rollouts.METRICS)
        if unknown:
            raise UsageError(f"metrics: {min(unknown)!r} is unknown; must be among {', '.join(rollouts.METRICS)}")
        self._models, self.metrics = ModelManager(), tuple(metrics)
        self.a, self.b = self._models.version(model_a), self._models.version(model_b)
        arms = ("a", "b") if {"a", "b"} & set(traffic) else (model_a, model_b)
        self.share = share_of(share_of_two("traffic", traffic, arms))
        self.rollout: str | None = None

    def run(self, test_duration_days: float = 7) -> dict[str, dict[str, float | None]]:
        """Wait until the registry decides, at most `test_duration_days`, and return {"a": {metric: mean}, "b": ...}.

        A metric without values is None. The traffic stays split until `switch_traffic`.
        """
        stack, client = current(), rollouts.Rollouts(self._models.registry)
        try:
            self.rollout = client.try_version(stack.model, self.b, self.share, test_duration_days * _DAY_S).id
        except Unreachable:
            rollout = client.newest_of(stack.model, self.b)
            if rollout is None:
                raise
            self.rollout = rollout.id
        means = blocking(arm_means(stack.bus, self.rollout))
        return {arm: {name: means[arm].get(name) for name in self.metrics} for arm in ("a", "b")}

    def switch_traffic(self, arm: str, share: float = 1.0) -> str:
        """Send all traffic to an arm and return the version that serves. For a smaller share, create another test."""
        if arm not in ("a", "b") or share != 1.0:
            raise UsageError(
                f"switch_traffic({arm!r}, {share}): arm must be a or b and share must be 1; "
                "create a new test for another share"
            )
        version, registry = self.b if arm == "b" else self.a, self._models.registry
        rollout = rollouts.Rollouts(registry).newest_of(self._models.model, self.b)
        if rollout is not None and rollout.phase == "canary":
            rollouts.Rollouts(registry).stop(rollout.id, reason=f"all traffic goes to {arm}")
        if registry.model(self._models.model).champion != version:
            self._models.rollback(version)
        blocking(current().until_serving(version, _WAIT_S))
        return version


def share_of_two(argument: str, ratios: Mapping[str, Any], arms: tuple[str, str]) -> float:
    """Return the share of the second arm from a mapping with the shares of both arms.

    Raises:
        UsageError: the sum of the shares is not 1.
    """
    check_names(argument, ratios, arms)
    shares = [real_number(f"{argument}.{arm}", ratios[arm]) for arm in arms if arm in ratios]
    if len(shares) != 2 or abs(sum(shares) - 1) > _ROUNDING:
        raise UsageError(
            f"{argument} = {dict(ratios)}: must have the shares of {arms[0]} and {arms[1]}, with the sum 1"
        )
    return shares[1]


def share_of(ratio: Any, name: str = "share") -> str:
    """Return a share as an exact fraction in text, for example "1/10" for 0.1.

    Raises:
        UsageError: the share is not a number above 0 and at most 1/2. `name` is the name of the argument, for the
            message.
    """
    try:
        share = Fraction(str(ratio)).limit_denominator(10_000)
    except (ValueError, ZeroDivisionError, OverflowError):
        raise UsageError(f"{name} = {printable(repr(ratio))}: must be a number, such as 0.1 or 1/10") from None
    if not 0 < share <= Fraction(1, 2):
        raise UsageError(f"{name} = {ratio}: must be above 0 and at most 1/2, because the control gets an equal share")
    return f"{share.numerator}/{share.denominator}"


ARMS = {"control": "a", "candidate": "b"}
SUCCESS = 0.5
"""Mean reward from which a session counts as a success."""
RATERS = ("user", "feedback")


async def arm_means(bus: str, rollout: str) -> dict[str, dict[str, float]]:
    """Return the mean of each metric over the sessions of each arm of a rollout.

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
