"""Rollouts from a program: look, begin, end; and two small helpers under the names that they have elsewhere.

with ModelRegistry() as registry:
    updater = HotUpdater("email-agent", registry, canary_ratio="1/20")
    if updater.has_new_model() and updater.test_canary():
        updater.rollout_update()
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.errors import Unreachable, UsageError
from headrace.registry import ModelRegistry
from headrace_schemas.registry_api import ModelState, VersionState
from headrace_schemas.rollout_api import RolloutChange, RolloutKind, RolloutList, RolloutRequest, RolloutState

METRICS = {"accuracy": "success", "latency": "latency", "user_satisfaction": "satisfaction"}
"""What they are called here, and what the registry calls them."""
_POLL_S = 1.0


@dataclass(frozen=True)
class Rollouts:
    """The registry's pages about rollouts. Methods raise as `ModelRegistry`'s do."""

    registry: ModelRegistry

    def list(self, model: str | None = None, *, limit: int = 100) -> tuple[RolloutState, ...]:
        """The newest first, without charts."""
        wanted = f"&model={model}" if model else ""
        return self.registry.ask("GET", f"/v1/rollouts?limit={limit}{wanted}", RolloutList).data

    def get(self, rollout: str) -> RolloutState:
        return self.registry.ask("GET", f"/v1/rollouts/{rollout}", RolloutState)

    def begin(
        self, model: str, version: str, *, kind: RolloutKind = "canary", share: str | None = None, reason: str = ""
    ) -> ModelState:
        """The version goes through the gate and then gets its share; the rollout is listed from then on."""
        body = RolloutRequest(version=version, kind=kind, share=share, reason=reason)
        return self.registry.ask("POST", f"/v1/models/{model}/rollouts", ModelState, body)

    def stop(self, rollout: str, *, reason: str = "") -> RolloutState:
        """Its version serves nobody any more; nothing is said against it."""
        return self._end(rollout, "stop", reason)

    def promote(self, rollout: str, *, reason: str = "") -> RolloutState:
        """Its version is champion at once."""
        return self._end(rollout, "promote", reason)

    def roll_back(self, rollout: str, *, reason: str = "") -> RolloutState:
        """Its version is withdrawn, with what descends from it."""
        return self._end(rollout, "rollback", reason)

    def of(self, model: str, version: str, *, after: str | None = None) -> RolloutState | None:
        """The version's newest rollout, unless it is `after`, which was known before."""
        found = next((one for one in self.list(model) if one.version == version), None)
        return None if found is None or found.id == after else found

    def wait(
        self,
        model: str,
        version: str,
        until: Callable[[RolloutState], bool],
        timeout_s: float,
        after: str | None = None,
    ) -> RolloutState:
        """Raises `Unreachable` when it takes longer, `UsageError` when the version never gets to live traffic."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            found = self.of(model, version, after=after)
            if found is not None and until(found):
                return self.get(found.id)
            state = _version(self.registry, model, version)
            if found is None and state.state in ("promoted", "rejected", "withdrawn", "skipped"):
                raise UsageError(f"{version} is {state.state}: {_why(state)}")
            time.sleep(_POLL_S)
        raise Unreachable(f"the rollout of {version} has not come so far after {timeout_s:g} s")

    def _end(self, rollout: str, how: str, reason: str) -> RolloutState:
        return self.registry.ask("POST", f"/v1/rollouts/{rollout}/{how}", RolloutState, RolloutChange(reason=reason))


@dataclass
class HotUpdater:
    """Newer weights for a model that serves, tried on a share of its traffic first."""

    model: str
    registry: ModelRegistry
    canary_ratio: str = "1/20"
    check_after_updates: int = 1
    """So many versions newer than the champion are worth a look."""
    timeout_s: float = 86_400.0
    tested: RolloutState | None = field(default=None, init=False)

    def newer(self) -> list[VersionState]:
        """Versions behind the champion in the order of arrival that may serve, the newest first."""
        champion = self.registry.model(self.model).champion
        found: list[VersionState] = []
        for one in self.registry.versions(self.model, limit=1000):
            if one.id == champion:
                break
            if one.state in ("registered", "held", "skipped"):
                found.append(one)
        return found

    def has_new_model(self) -> bool:
        return len(self.newer()) >= self.check_after_updates

    def test_canary(self, version: str | None = None) -> bool:
        """Give `canary_ratio` of the traffic to a version (the newest) and wait for what its sessions show. The
        champion stays: `rollout_update` is the next step."""
        wanted = version or next((one.id for one in self.newer()), None)
        if wanted is None:
            raise UsageError(f"{self.model} has no version that is newer than its champion")
        rollouts = Rollouts(self.registry)
        before = rollouts.of(self.model, wanted)
        rollouts.begin(self.model, wanted, kind="ab", share=self.canary_ratio)
        known = before.id if before else None
        self.tested = rollouts.wait(self.model, wanted, lambda one: one.phase != "canary", self.timeout_s, known)
        return self.tested.good_enough

    def rollout_update(self, version: str | None = None, *, rolling: bool = False) -> None:
        """The version that `test_canary` found good enough serves everybody. `rolling`: any version, after gate and
        probe alone."""
        if rolling:
            wanted = version or next((one.id for one in self.newer()), None)
            if wanted is None:
                raise UsageError(f"{self.model} has no version that is newer than its champion")
            Rollouts(self.registry).begin(self.model, wanted, kind="rolling")
            return
        if self.tested is None or not self.tested.good_enough or version not in (None, self.tested.version):
            raise UsageError(f"no canary of {version or self.model} was found good enough; call test_canary before")
        self.registry.promote(self.model, self.tested.version, force=True)

    def rollback(self, reason: str = "") -> str | None:
        """The champion before this one serves again. Returns it."""
        return self.registry.roll_back(self.model, reason=reason).champion


@dataclass(frozen=True)
class Comparison:
    """B less A, for each metric: the difference and the ends of its confidence sequence. `winner` None: undecided."""

    version: str
    winner: str | None
    reason: str
    metrics: dict[str, tuple[float, float, float]]


@dataclass
class ABTestFramework:
    """A version against the champion on a fixed share of the traffic each."""

    model: str
    registry: ModelRegistry
    timeout_s: float = 86_400.0

    def run(self, version: str, *, share: str = "1/2") -> Comparison:
        """Wait until the sessions have shown something. Traffic stays as it was before; see `switch_traffic`."""
        rollouts = Rollouts(self.registry)
        before = rollouts.of(self.model, version)
        rollouts.begin(self.model, version, kind="ab", share=share)
        known = before.id if before else None
        found = rollouts.wait(self.model, version, lambda one: one.phase != "canary", self.timeout_s, known)
        winner = found.control if found.phase == "rolled_back" else found.version if found.good_enough else None
        return Comparison(version, winner, found.reason, compared(found))

    def switch_traffic(self, version: str) -> None:
        """Everybody gets this version, past the gate, once replicas have probed it."""
        self.registry.promote(self.model, version, force=True)


def compared(rollout: RolloutState) -> dict[str, tuple[float, float, float]]:
    """Accuracy, latency and user satisfaction, as far as sessions said something of them."""
    numbers, found = rollout.statistics, {}
    for name, metric in METRICS.items():
        ends = [numbers.get(f"{metric}.{part}") for part in ("difference", "lower", "upper")]
        if all(end is not None for end in ends):
            found[name] = (float(ends[0] or 0), float(ends[1] or 0), float(ends[2] or 0))
    return found


def _version(registry: ModelRegistry, model: str, version: str) -> VersionState:
    return next(one for one in registry.versions(model, limit=1000) if one.id == version)


def _why(version: VersionState) -> str:
    return next((event.reason for event in reversed(version.decisions) if event.reason), "no reason given")
