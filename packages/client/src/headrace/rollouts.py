"""Functions and classes that begin, follow and end rollouts from a program: `Rollouts`, `HotUpdater`, `ABTestFramework`
and `ModelManager`.

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
from headrace_schemas.http.catalog import AliasesRequest, AliasMove
from headrace_schemas.http.registry_api import (
    ModelState,
    RolloutChange,
    RolloutKind,
    RolloutList,
    RolloutRequest,
    RolloutState,
    VersionState,
)

METRICS = {"accuracy": "success", "latency": "latency", "user_satisfaction": "satisfaction"}
"""For each metric name of `ABTestFramework`, the name of the metric in the registry."""
_POLL_S = 1.0


@dataclass(frozen=True)
class Rollouts:
    """Client of the registry's endpoints for rollouts. Methods raise the exceptions of `ModelRegistry`."""

    registry: ModelRegistry

    def list(self, model: str | None = None, *, limit: int = 100) -> tuple[RolloutState, ...]:
        """Return rollouts without their charts, newest first."""
        filters = f"&model={model}" if model else ""
        return self.registry.ask("GET", f"/v1/rollouts?limit={limit}{filters}", RolloutList).data

    def get(self, rollout: str) -> RolloutState:
        return self.registry.ask("GET", f"/v1/rollouts/{rollout}", RolloutState)

    def begin(
        self, model: str, version: str, *, kind: RolloutKind = "canary", share: str | None = None, reason: str = ""
    ) -> ModelState:
        """Request a rollout of a version.

        The version must pass the gate first. Then its rollout begins, and it gets its share of the traffic. From that
        time on, the rollout is in `list`.
        """
        body = RolloutRequest(version=version, kind=kind, share=share, reason=reason)
        return self.registry.ask("POST", f"/v1/models/{model}/rollouts", ModelState, body)

    def stop(self, rollout: str, *, reason: str = "") -> RolloutState:
        """End a rollout without a promotion or a rollback: its version gets no more traffic, but is not withdrawn."""
        return self._end(rollout, "stop", reason)

    def promote(self, rollout: str, *, reason: str = "") -> RolloutState:
        """Make the version of a rollout champion immediately."""
        return self._end(rollout, "promote", reason)

    def roll_back(self, rollout: str, *, reason: str = "") -> RolloutState:
        """Withdraw the version of a rollout and all versions that descend from it."""
        return self._end(rollout, "rollback", reason)

    def newest_of(self, model: str, version: str) -> RolloutState | None:
        """Return the newest rollout of a version, or None."""
        return next((rollout for rollout in self.list(model) if rollout.version == version), None)

    def try_version(self, model: str, version: str, share: str, timeout_s: float) -> RolloutState:
        """Run an A/B test of a version with a fixed share of the traffic, wait until it has ended, and return the
        rollout.

        The champion stays. Raises `Unreachable` if the test takes longer than `timeout_s`, and `UsageError` if the
        version never gets traffic.
        """
        before, deadline = self.newest_of(model, version), time.monotonic() + timeout_s
        self.begin(model, version, kind="ab", share=share)
        while time.monotonic() < deadline:
            rollout = self.newest_of(model, version)
            if rollout is not None and rollout.id != (before and before.id):
                if rollout.phase not in ("shadow", "canary"):
                    return self.get(rollout.id)
            else:
                states = self.registry.versions(model, limit=1000)
                state = next(state for state in states if state.id == version)
                if state.state in ("promoted", "rejected", "withdrawn", "skipped"):
                    why = next((event.reason for event in reversed(state.decisions) if event.reason), "no reason given")
                    raise UsageError(f"{version} is {state.state}: {why}")
            time.sleep(_POLL_S)
        raise Unreachable(
            f"the rollout of {version} has not ended after {timeout_s:g} s; "
            "raise timeout_s or look at `headrace rollouts`"
        )

    of, tried = newest_of, try_version
    """Earlier names of these methods."""

    def _end(self, rollout: str, action: str, reason: str) -> RolloutState:
        return self.registry.ask("POST", f"/v1/rollouts/{rollout}/{action}", RolloutState, RolloutChange(reason=reason))


@dataclass
class HotUpdater:
    """Replaces the served version of a model by a newer one, which is first tested on a share of the traffic."""

    model: str
    registry: ModelRegistry
    canary_ratio: str = "1/20"
    check_after_updates: int = 1
    """Number of versions newer than the champion from which on `has_new_model` is true."""
    timeout_s: float = 86_400.0
    tested: RolloutState | None = field(default=None, init=False)

    def newer(self) -> list[VersionState]:
        """Return the versions that were published after the champion and may be served, newest first."""
        champion = self.registry.model(self.model).champion
        versions: list[VersionState] = []
        for version in self.registry.versions(self.model, limit=1000):
            if version.id == champion:
                break
            if version.state in ("registered", "held", "skipped"):
                versions.append(version)
        return versions

    def has_new_model(self) -> bool:
        return len(self.newer()) >= self.check_after_updates

    def test_canary(self, version: str | None = None) -> bool:
        """Test a version (by default the newest) on `canary_ratio` of the traffic. Return whether it is good enough to
        be promoted.

        The champion stays until `rollout_update`.
        """
        candidate = version or self._newest()
        self.tested = Rollouts(self.registry).try_version(self.model, candidate, self.canary_ratio, self.timeout_s)
        return self.tested.good_enough

    def rollout_update(self, version: str | None = None, *, rolling: bool = False) -> None:
        """Make the version that passed `test_canary` the champion.

        Args:
            version: version to promote; by default the tested version.
            rolling: request a rolling rollout instead, of any version (by default the newest). It becomes the champion
                after it has passed the probe and the gate, without a test on traffic.
        """
        if rolling:
            Rollouts(self.registry).begin(self.model, version or self._newest(), kind="rolling")
        elif self.tested is None or not self.tested.good_enough or version not in (None, self.tested.version):
            raise UsageError(f"no canary of {version or self.model} has passed; call test_canary first")
        else:
            self.registry.promote(self.model, self.tested.version, force=True)

    def rollback(self, reason: str = "") -> str | None:
        """Make the previous champion the champion again, and return its name."""
        return self.registry.roll_back(self.model, reason=reason).champion

    def _newest(self) -> str:
        newer = self.newer()
        if not newer:
            raise UsageError(f"{self.model} has no version that is newer than its champion")
        return newer[0].id


@dataclass(frozen=True)
class ABResult:
    """Result of an A/B test: for each metric the difference B - A, and the lower and upper bound of its confidence
    sequence.

    `winner` is None while the test is undecided.
    """

    version: str
    winner: str | None
    reason: str
    metrics: dict[str, tuple[float, float, float]]


@dataclass
class ABTestFramework:
    """A/B test of a version against the champion, each with a fixed share of the traffic."""

    model: str
    registry: ModelRegistry
    timeout_s: float = 86_400.0

    def run(self, version: str, *, share: str = "1/2") -> ABResult:
        """Run the test until the registry has decided, and return the result.

        The test leaves the champion in place; `switch_traffic` replaces it.
        """
        rollout = Rollouts(self.registry).try_version(self.model, version, share, self.timeout_s)
        winner = rollout.control if rollout.phase == "rolled_back" else rollout.version if rollout.good_enough else None
        return ABResult(version, winner, rollout.reason, metric_differences(rollout))

    def switch_traffic(self, version: str) -> None:
        """Make a version the champion. It skips the gate, but replicas must probe it first."""
        self.registry.promote(self.model, version, force=True)


def metric_differences(rollout: RolloutState) -> dict[str, tuple[float, float, float]]:
    """Return, for accuracy, latency and user satisfaction, the difference of the versions and the bounds of its
    confidence sequence. Metrics without values are left out."""
    numbers = rollout.statistics
    metrics = {name: metric for name, metric in METRICS.items() if f"{metric}.lower" in numbers}
    return {
        name: (numbers[f"{m}.difference"], numbers[f"{m}.lower"], numbers[f"{m}.upper"]) for name, m in metrics.items()
    }


@dataclass(frozen=True)
class ModelManager:
    """Named versions of one model.

    Methods raise the exceptions of `ModelRegistry`, and `UsageError` if no version has the given name.
    """

    model: str
    registry: ModelRegistry

    def create_version(self, name: str, version: str | None = None, *, why: str = "") -> str:
        """Give a version (by default the champion) a name, and return the version.

        Replicas keep a version with a name loaded. The registry refuses a name that another version already has.
        """
        target = version or self.registry.model(self.model).champion
        if target is None:
            raise UsageError(f"model {self.model} has no champion to name {name}; pass the version that gets the name")
        body = AliasesRequest(moves={name: AliasMove(version=target, expected=None)}, why=why)
        self.registry.ask("POST", f"/v1/models/{self.model}/aliases", ModelState, body)
        return target

    def version(self, name: str) -> str:
        """Return the version to which a name refers: an alias, a label or a version id."""
        versions = self.registry.versions(self.model, limit=1000)
        version = next((state.id for state in versions if name in (state.label, state.id)), None)
        if not (version := version or self.registry.model(self.model).aliases.get(name)):
            raise UsageError(f"model {self.model} has no version {name!r}; `headrace models show` lists them")
        return version

    def rollback(self, version: str) -> ModelState:
        """Make the version with this name the champion. It skips the gate, but replicas must probe it first."""
        return self.registry.promote(self.model, self.version(version), force=True)

    def create_ab_test(self, version_a: str, version_b: str, share: str = "1/2") -> ModelState:
        """Begin an A/B test of version B against version A, which must be the champion.

        Version B gets `share` of the traffic once it has passed the gate. `Rollouts` follows the test.
        """
        if self.registry.model(self.model).champion != self.version(version_a):
            raise UsageError(
                f"version_a = {version_a}: is not the champion of {self.model}; "
                "a test compares against the champion only"
            )
        return Rollouts(self.registry).begin(self.model, self.version(version_b), kind="ab", share=share)
