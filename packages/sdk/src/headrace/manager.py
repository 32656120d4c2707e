"""`ModelManager`: the versions of one model under names such as `v1.0`; the registry decides what a name means."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.errors import UsageError
from headrace.registry import ModelRegistry
from headrace.rollouts import Rollouts
from headrace_schemas.catalog import AliasesRequest, AliasMove
from headrace_schemas.registry_api import ModelState


@dataclass(frozen=True)
class ModelManager:
    """Methods raise as `ModelRegistry`'s do, and `UsageError` for a name that means no version."""

    model: str
    registry: ModelRegistry

    def create_version(self, name: str, version: str | None = None, *, why: str = "") -> str:
        """Name a version, the champion unless said. It stays served, and a name that another version has is refused."""
        wanted = version or self.registry.model(self.model).champion
        if wanted is None:
            raise UsageError(f"model {self.model} has no champion to name {name}; say which version it shall be")
        body = AliasesRequest(moves={name: AliasMove(version=wanted, expected=None)}, why=why)
        self.registry.ask("POST", f"/v1/models/{self.model}/aliases", ModelState, body)
        return wanted

    def version(self, name: str) -> str:
        """What a name means: an alias, a label, or the version itself."""
        known = self.registry.versions(self.model, limit=1000)
        found = next((one.id for one in known if name in (one.label, one.id)), None)
        if not (found := found or self.registry.model(self.model).aliases.get(name)):
            raise UsageError(f"model {self.model} has no version {name!r}; `headrace models show` lists them")
        return found

    def rollback(self, version: str) -> ModelState:
        """The version of that name serves everybody, past the gate, once replicas have probed it."""
        return self.registry.promote(self.model, self.version(version), force=True)

    def create_ab_test(self, version_a: str, version_b: str, share: str = "1/2") -> ModelState:
        """Give B so much of the traffic beside A, the champion, once it has passed the gate. `Rollouts` follows it."""
        if self.registry.model(self.model).champion != self.version(version_a):
            raise UsageError(f"{version_a} is not the champion of {self.model}, and tests are against that alone")
        return Rollouts(self.registry).begin(self.model, self.version(version_b), kind="ab", share=share)
