"""`ModelManager`: named versions of one model, such as `v1.0`. The registry stores the names."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.errors import UsageError
from headrace.registry import ModelRegistry
from headrace.rollouts import Rollouts
from headrace_schemas.http.catalog import AliasesRequest, AliasMove
from headrace_schemas.http.registry_api import ModelState


@dataclass(frozen=True)
class ModelManager:
    """Named versions of one model.

    Methods raise the exceptions of `ModelRegistry`, and `UsageError` if no version has the given name.
    """

    model: str
    registry: ModelRegistry

    def create_version(self, name: str, version: str | None = None, *, why: str = "") -> str:
        """Give a name to a version, by default to the champion, and return the version.

        Replicas keep a named version loaded. The registry refuses a name that another version already has.
        """
        target = version or self.registry.model(self.model).champion
        if target is None:
            raise UsageError(f"model {self.model} has no champion to name {name}; pass the version that gets the name")
        body = AliasesRequest(moves={name: AliasMove(version=target, expected=None)}, why=why)
        self.registry.ask("POST", f"/v1/models/{self.model}/aliases", ModelState, body)
        return target

    def version(self, name: str) -> str:
        """Return the version of a name, which may be an alias, a label or the version id."""
        versions = self.registry.versions(self.model, limit=1000)
        version = next((state.id for state in versions if name in (state.label, state.id)), None)
        if not (version := version or self.registry.model(self.model).aliases.get(name)):
            raise UsageError(f"model {self.model} has no version {name!r}; `headrace models show` lists them")
        return version

    def rollback(self, version: str) -> ModelState:
        """Make the named version champion. It skips the gate, but replicas must probe it first."""
        return self.registry.promote(self.model, self.version(version), force=True)

    def create_ab_test(self, version_a: str, version_b: str, share: str = "1/2") -> ModelState:
        """Start an A/B test of version B against the champion A.

        Version B gets `share` of the traffic once it has passed the gate. `Rollouts` follows the test.
        """
        if self.registry.model(self.model).champion != self.version(version_a):
            raise UsageError(
                f"version_a = {version_a}: is not the champion of {self.model}; "
                "a test compares against the champion only"
            )
        return Rollouts(self.registry).begin(self.model, self.version(version_b), kind="ab", share=share)
