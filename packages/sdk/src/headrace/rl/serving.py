"""`HotUpdater`, `ModelManager`, `ABTestFramework` as the article calls them; the registry decides and keeps
everything."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from headrace import manager, rollouts
from headrace.errors import Unreachable, UsageError
from headrace.practice.agents import text_of
from headrace.practice.arguments import check_names, real_number, whole_number
from headrace.practice.blocking import blocking
from headrace.practice.collecting import collected
from headrace.stack import current
from headrace.stack.arms import arm_means
from headrace_schemas.registry_api import ModelState
from headrace_schemas.text import printable

_WAIT_S = 300.0
_DAY_S = 86_400.0
_ROUNDING = 1e-6
log = logging.getLogger("headrace.rl")


class HotUpdater:
    """New weights for an agent that serves. While it is there the model is paused: versions wait for what it decides.

    `update_config`: `strategy` "rolling" or "canary"; `canary_ratio`, the share that live sessions get in a canary
    (with "rolling" a warning says that it has no effect); `check_after_updates`, how many versions newer than the
    champion are worth a look. `close` ends the pause.
    """

    def __init__(self, agent: Any, update_config: Mapping[str, Any] | None = None) -> None:
        given: dict[str, Any] = {"strategy": "rolling", "canary_ratio": 0.1, "check_after_updates": 1}
        check_names("update_config", update_config or {}, list(given))
        given |= dict(update_config or {})
        if given["strategy"] not in ("rolling", "canary"):
            shown = printable(repr(given["strategy"]))
            raise UsageError(f"update_config.strategy = {shown}: strategy is rolling or canary; there are no others")
        if given["strategy"] == "rolling" and "canary_ratio" in (update_config or {}):
            log.warning("update_config.canary_ratio: has no effect with strategy rolling; live sessions get no share")
        self.agent, self.strategy, self.stack = agent, given["strategy"], current()
        self.tested: str | None = None
        every = whole_number("update_config.check_after_updates", given["check_after_updates"])
        self._updater = rollouts.HotUpdater(
            self.stack.model,
            self.stack.registry,
            share_of(given["canary_ratio"], "update_config.canary_ratio"),
            every,
            _WAIT_S,
        )
        self.stack.registry.pause(self.stack.model, reason="a program decides about updates")

    def has_new_model(self) -> bool:
        return self._updater.has_new_model()

    def test_canary(self, test_cases: Sequence[Any]) -> dict[str, float]:
        """The newest version answers the cases; no user sees it. A case is a question, or {"question", "check"} with
        `check(answer)` or a text that the answer has to hold. A question alone is answered well by any text."""
        self.tested = self._updater.newer()[0].id
        blocking(self.stack.hold(self.tested))
        passed = [self._passes(case) for case in test_cases]
        return {"success_rate": sum(passed) / len(passed), "cases": float(len(passed))}

    def rollout_update(self) -> str:
        """The version that was tested (the newest) serves everybody: at once, or by a canary on live traffic first."""
        wanted = self.tested or self._updater.newer()[0].id
        if self.strategy == "canary" and not self._updater.test_canary(wanted):
            raise UsageError(f"{wanted} was not found good enough by the sessions of its canary")
        if self.strategy == "canary":
            self._updater.rollout_update(wanted)
        else:
            self.stack.registry.promote(self.stack.model, wanted, force=True)
        blocking(self.stack.until_serving(wanted, _WAIT_S))
        return wanted

    def rollback(self) -> str | None:
        """The version that was tested is withdrawn. Once it serves, the one before it takes over. Returns who
        serves."""
        champion = self.stack.registry.model(self.stack.model).champion
        if self.tested is None or self.tested == champion:
            return self._updater.rollback("asked for by a program")
        self.stack.registry.withdraw(self.stack.model, self.tested, reason="it failed its test cases")
        return champion

    def close(self) -> None:
        self.stack.registry.resume(self.stack.model, reason="the program has ended")

    def _passes(self, case: Any) -> bool:
        question, check = case, None
        if isinstance(case, Mapping):
            check_names("test_cases", case, ("question", "check"))
            question, check = case["question"], case.get("check")
        _, found = collected(self.agent, str(question), purpose="eval", model=self.tested)
        answer = text_of(found)
        holds: Callable[[str], bool] = (
            check if callable(check) else lambda text: bool(text) and str(check or "") in text
        )
        return bool(holds(answer))


class ModelManager(manager.ModelManager):
    """Names for versions of the model of the stack that was entered. `checkpoint_dir` is where a private stack keeps
    its versions, in its blob store; a running one has its own place."""

    def __init__(self, checkpoint_dir: str | None = None) -> None:
        stack = current()
        if checkpoint_dir and (stack.data_dir is None or Path(checkpoint_dir).absolute() != stack.data_dir.absolute()):
            place = stack.data_dir or "a place of its own"
            raise UsageError(
                f"checkpoint_dir = {checkpoint_dir!r}: this stack keeps its versions in {place}; leave it out"
            )
        super().__init__(stack.model, stack.registry)

    def create_ab_test(self, version_a: str, version_b: str, traffic_ratio: Any = "1/2") -> ModelState:
        """`traffic_ratio` = {"v1.0": 0.7, "v1.1": 0.3}, or B's share. B has to be the smaller one, or as large."""
        wanted = traffic_ratio
        if isinstance(traffic_ratio, Mapping):
            wanted = share_of_two("traffic_ratio", traffic_ratio, (version_a, version_b))
        return super().create_ab_test(version_a, version_b, share_of(wanted))


class ABTestFramework:
    """Two versions on live traffic; `model_a` is the champion. Results are means over the sessions of each arm."""

    def __init__(
        self, model_a: str, model_b: str, traffic: Mapping[str, float], metrics: Sequence[str] = tuple(rollouts.METRICS)
    ) -> None:
        unknown = set(metrics) - set(rollouts.METRICS)
        if unknown:
            raise UsageError(f"metrics: no metric {min(unknown)!r}; there are {', '.join(rollouts.METRICS)}")
        self._models, self.metrics = ModelManager(), tuple(metrics)
        self.a, self.b = self._models.version(model_a), self._models.version(model_b)
        arms = ("a", "b") if {"a", "b"} & set(traffic) else (model_a, model_b)
        self.share = share_of(share_of_two("traffic", traffic, arms))
        self.rollout: str | None = None

    def run(self, test_duration_days: float = 7) -> dict[str, dict[str, float | None]]:
        """Wait until the sessions have shown something, or for so long, and return {"a": {metric: mean}, "b": ...}. A
        metric that no session said anything of is None. Traffic stays split until `switch_traffic`."""
        stack, all_ = current(), rollouts.Rollouts(self._models.registry)
        try:
            self.rollout = all_.tried(stack.model, self.b, self.share, test_duration_days * _DAY_S).id
        except Unreachable:
            found = all_.of(stack.model, self.b)
            if found is None:
                raise
            self.rollout = found.id
        means = blocking(arm_means(stack.bus, self.rollout))
        return {arm: {name: means[arm].get(name) for name in self.metrics} for arm in ("a", "b")}

    def switch_traffic(self, arm: str, share: float = 1.0) -> str:
        """All traffic to an arm. A smaller share is another test. Returns the version that serves."""
        if arm not in ("a", "b") or share != 1.0:
            raise UsageError(
                f"switch_traffic({arm!r}, {share}): the arm is a or b, and the share 1; else make a new test"
            )
        wanted, registry = self.b if arm == "b" else self.a, self._models.registry
        begun = rollouts.Rollouts(registry).of(self._models.model, self.b)
        if begun is not None and begun.phase == "canary":
            rollouts.Rollouts(registry).stop(begun.id, reason=f"all traffic goes to {arm}")
        if registry.model(self._models.model).champion != wanted:
            self._models.rollback(wanted)
        blocking(current().until_serving(wanted, _WAIT_S))
        return wanted


def share_of_two(argument: str, ratios: Mapping[str, Any], arms: tuple[str, str]) -> float:
    """Return the second arm's share of a mapping with the shares of both. Raises `UsageError` if their sum is not 1."""
    check_names(argument, ratios, arms)
    shares = [real_number(f"{argument}.{arm}", ratios[arm]) for arm in arms if arm in ratios]
    if len(shares) != 2 or abs(sum(shares) - 1) > _ROUNDING:
        raise UsageError(f"{argument} = {dict(ratios)}: name the shares of {arms[0]} and {arms[1]}, whose sum is 1")
    return shares[1]


def share_of(ratio: Any, name: str = "share") -> str:
    """A share as an exact fraction: 0.1 is 1/10. Raises `UsageError` with the `name` of the argument."""
    try:
        found = Fraction(str(ratio)).limit_denominator(10_000)
    except (ValueError, ZeroDivisionError, OverflowError):
        raise UsageError(f"{name} = {printable(repr(ratio))}: must be a number, such as 0.1 or 1/10") from None
    if not 0 < found <= Fraction(1, 2):
        raise UsageError(
            f"{name} = {ratio}: the new version gets more than nothing and at most a half, beside its control"
        )
    return f"{found.numerator}/{found.denominator}"
