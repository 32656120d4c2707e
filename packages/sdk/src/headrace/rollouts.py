"""Rollouts from a program: look, begin, end; and two small helpers under the names that they have elsewhere.

with ModelRegistry() as registry:
    updater = HotUpdater("email-agent", registry, canary_ratio="1/20")
    if updater.has_new_model() and updater.test_canary():
        updater.rollout_update()
"""

from __future__ import annotations

import time
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

    def of(self, model: str, version: str) -> RolloutState | None:
        """The version's newest."""
        return next((one for one in self.list(model) if one.version == version), None)

    def tried(self, model: str, version: str, share: str, timeout_s: float) -> RolloutState:
        """Give a version a fixed share and wait for what its sessions show; the champion stays. Raises `Unreachable`
        when that takes longer, `UsageError` when the version never gets to live traffic."""
        before, deadline = self.of(model, version), time.monotonic() + timeout_s
        self.begin(model, version, kind="ab", share=share)
        while time.monotonic() < deadline:
            found = self.of(model, version)
            if found is not None and found.id != (before and before.id):
                if found.phase not in ("shadow", "canary"):
                    return self.get(found.id)
            else:
                state = next(one for one in self.registry.versions(model, limit=1000) if one.id == version)
                if state.state in ("promoted", "rejected", "withdrawn", "skipped"):
                    why = next((event.reason for event in reversed(state.decisions) if event.reason), "no reason given")
                    raise UsageError(f"{version} is {state.state}: {why}")
            time.sleep(_POLL_S)
        raise Unreachable(f"the rollout of {version} is not over after {timeout_s:g} s")

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
        """Give `canary_ratio` of the traffic to a version (the newest); the champion stays until `rollout_update`."""
        wanted = version or self._newest()
        self.tested = Rollouts(self.registry).tried(self.model, wanted, self.canary_ratio, self.timeout_s)
        return self.tested.good_enough

    def rollout_update(self, version: str | None = None, *, rolling: bool = False) -> None:
        """The version that `test_canary` found good enough serves everybody. `rolling`: any version, after gate and
        probe alone."""
        if rolling:
            Rollouts(self.registry).begin(self.model, version or self._newest(), kind="rolling")
        elif self.tested is None or not self.tested.good_enough or version not in (None, self.tested.version):
            raise UsageError(f"no canary of {version or self.model} was found good enough; call test_canary before")
        else:
            self.registry.promote(self.model, self.tested.version, force=True)

    def rollback(self, reason: str = "") -> str | None:
        """The champion before this one serves again. Returns it."""
        return self.registry.roll_back(self.model, reason=reason).champion

    def _newest(self) -> str:
        newer = self.newer()
        if not newer:
            raise UsageError(f"{self.model} has no version that is newer than its champion")
        return newer[0].id


@dataclass(frozen=True)
class ABResult:
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

    def run(self, version: str, *, share: str = "1/2") -> ABResult:
        """Wait until the sessions have shown something. Traffic stays as it was before; see `switch_traffic`."""
        found = Rollouts(self.registry).tried(self.model, version, share, self.timeout_s)
        winner = found.control if found.phase == "rolled_back" else found.version if found.good_enough else None
        return ABResult(version, winner, found.reason, compared(found))

    def switch_traffic(self, version: str) -> None:
        """Everybody gets this version, past the gate, once replicas have probed it."""
        self.registry.promote(self.model, version, force=True)


def compared(rollout: RolloutState) -> dict[str, tuple[float, float, float]]:
    """Accuracy, latency and user satisfaction, as far as sessions said something of them."""
    numbers = rollout.statistics
    known = {name: metric for name, metric in METRICS.items() if f"{metric}.lower" in numbers}
    return {
        name: (numbers[f"{m}.difference"], numbers[f"{m}.lower"], numbers[f"{m}.upper"]) for name, m in known.items()
    }
