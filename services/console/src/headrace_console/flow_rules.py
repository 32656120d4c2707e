"""Settings of other services that decide when something is trained and which version takes over."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field

from headrace_console.learning import GateRule, describe_rule
from headrace_runtime.settings.sections import Common, Section
from headrace_schemas.values.ids import first_fitting


class RewardRules(Section):
    """The settings of the scorer that decide when a run has its reward."""

    required: tuple[str, ...] = ()
    expected: tuple[str, ...] = ()
    reward_wait_s: float = 600.0
    weights: dict[str, float] = Field(default_factory=lambda: {"*": 1.0})

    def weight(self, source: str) -> float:
        """Return the weight of a source in the reward: that of the first pattern that fits, or 0."""
        return first_fitting(self.weights, source) or 0.0


class BatchRules(Section):
    """The settings of the trainer that decide when a batch is complete."""

    batch_experiences: int = 64
    batch_experiences_min: int = 8
    batch_wait_s: float = 30.0

    @property
    def experiences_after_wait(self) -> int:
        """Number of experiences that are enough for a step once `batch_wait_s` has passed."""
        return min(self.batch_experiences_min, self.batch_experiences)


class _CollectorSection(Section):
    idle_s: float = 300.0


class _RegistrySection(Section):
    gate: dict[str, object] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FlowRules:
    """Settings of the collector, the scorer, the trainer and the registry that the pages Loop and Why show."""

    idle_s: float
    rewards: RewardRules
    batches: BatchRules
    gate: str
    """The gate's rule as a sentence."""

    @classmethod
    def read(cls, common: Common) -> FlowRules:
        """Return the rules that the settings of these services contain."""
        gate = common.section_of("registry", _RegistrySection).gate
        decisive = {name: value for name, value in gate.items() if name in GateRule.model_fields}
        return cls(
            common.section_of("collector", _CollectorSection).idle_s,
            common.section_of("scorer", RewardRules),
            common.section_of("trainer", BatchRules),
            describe_rule(GateRule.model_validate(decisive)),
        )
