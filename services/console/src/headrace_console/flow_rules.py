"""Settings of other services that decide when something is trained and which version takes over."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field

from headrace_console.learning import GateRule, describe_rule
from headrace_runtime.settings.sections import Common, Section


@dataclass(frozen=True, slots=True)
class RewardRules:
    """The settings of the scorer that decide when a run has its reward."""

    required: tuple[str, ...] = ()
    expected: tuple[str, ...] = ()
    reward_wait_s: float = 600.0


@dataclass(frozen=True, slots=True)
class BatchRules:
    """The settings of the trainer that decide when a batch is complete."""

    batch_experiences: int = 64
    batch_experiences_min: int = 8
    batch_wait_s: float = 30.0


class _CollectorSection(Section):
    idle_s: float = 300.0


class _ScorerSection(Section):
    required: tuple[str, ...] = ()
    expected: tuple[str, ...] = ()
    reward_wait_s: float = 600.0


class _TrainerSection(Section):
    batch_experiences: int = 64
    batch_experiences_min: int = 8
    batch_wait_s: float = 30.0


class _RegistrySection(Section):
    gate: dict[str, object] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FlowRules:
    """The settings as the pages Loop and Why use them."""

    idle_s: float
    rewards: RewardRules
    batches: BatchRules
    gate: str
    """The rule of the gate in words."""

    @classmethod
    def read(cls, common: Common) -> FlowRules:
        """Return the rules of the settings of all services."""
        scorer = common.section_of("scorer", _ScorerSection)
        trainer = common.section_of("trainer", _TrainerSection)
        gate = common.section_of("registry", _RegistrySection).gate
        known = {name: value for name, value in gate.items() if name in GateRule.model_fields}
        least = min(trainer.batch_experiences_min, trainer.batch_experiences)
        return cls(
            common.section_of("collector", _CollectorSection).idle_s,
            RewardRules(scorer.required, scorer.expected, scorer.reward_wait_s),
            BatchRules(trainer.batch_experiences, least, trainer.batch_wait_s),
            describe_rule(GateRule.model_validate(known)),
        )
