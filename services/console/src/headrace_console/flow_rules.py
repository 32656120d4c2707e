"""Settings of other services that decide which turns are trained and which versions serve, and texts about drops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlencode

from pydantic import Field

from headrace_console.learning import GateRule, describe_rule
from headrace_runtime.settings.sections import Common, Section
from headrace_schemas.values.ids import first_match


class RewardRules(Section):
    """The settings of the scorer that decide when a run has its reward."""

    required: tuple[str, ...] = ()
    expected: tuple[str, ...] = ()
    reward_wait_s: float = 600.0
    weights: dict[str, float] = Field(default_factory=lambda: {"*": 1.0})

    def weight(self, source: str) -> float:
        """Return the weight of a source in the reward: that of the first pattern that matches its name, or 0."""
        return first_match(self.weights, source) or 0.0


class BatchRules(Section):
    """The settings of the trainer that decide when a batch is complete."""

    batch_experiences: int = 64
    batch_experiences_min: int = 8
    batch_wait_s: float = 30.0

    @property
    def experiences_after_wait(self) -> int:
        """Number of experiences that are enough for a step once `batch_wait_s` has passed."""
        return min(self.batch_experiences_min, self.batch_experiences)


class _TrainerSection(Section):
    algorithm: str = "reinforce++"


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
    algorithm: str
    """Name of the trainer's algorithm, which decides whether edits are trained."""
    gate: str
    """The gate's rule as a sentence."""

    @classmethod
    def read(cls, common: Common) -> FlowRules:
        """Return the rules by which turns become versions, as the settings of the services contain them."""
        gate = common.section_of("registry", _RegistrySection).gate
        decisive = {name: value for name, value in gate.items() if name in GateRule.model_fields}
        return cls(
            common.section_of("collector", _CollectorSection).idle_s,
            common.section_of("scorer", RewardRules),
            common.section_of("trainer", BatchRules),
            common.section_of("trainer", _TrainerSection).algorithm,
            describe_rule(GateRule.model_validate(decisive)),
        )


LEFT_OUT_REMEDIES = {
    "truncated_sampling": "your agent samples with temperature=0, top_p or top_k, so the probabilities of its tokens "
    "are unknown: call with temperature=1 and without top_p and top_k",
    "retried": "the client repeated these calls, and only the last answer counts",
    "undelivered": "the client had gone before the answer ended: raise the client's timeout, such as "
    "OpenAI(timeout=600)",
    "empty": "the answers have no tokens: raise max_tokens",
}
DROP_REMEDIES = {
    "stale": "they waited too long for the present version: raise trainer.max_staleness, or give the trainer more "
    "compute",
    "foreign_version": "a version that this trainer does not train answered: call the model that it trains",
    "no_logprobs": "your agent samples with temperature=0, or in another way that leaves the probabilities unknown: "
    "call with temperature=1, or train corrections by sft",
    "no_signal": "the algorithm does not train this kind of feedback: send rewards, or choose another algorithm",
    "temperature": "your agent samples at a temperature near 0: call with temperature=1",
    "no_reward": "no source scored these runs: add a reward function, or send feedback",
    "required_source_missing": "a source of scorer.required did not score: send its rewards, or remove it there",
    "singleton": "a group needs several runs of one task: repeat tasks, or choose an algorithm without groups",
    "too_long": "the runs are longer than the trainer accepts: shorten them, or raise its limit of tokens",
}
ORDINARY_REASONS = frozenset({"superseded", "already_trained", "unchanged", "withdrawn"})
"""Reasons for which the trainer drops experiences after late feedback. They need no remedy."""
_MEANINGS = {
    "eval": "The call was an evaluation (purpose eval), which is never trained.",
    "dead_letter": "A service refused the record; it is among the dead letters.",
    "undone": "The weights went back to a version from before this training.",
    "registered": "A fixed version answered, which is never trained.",
    "side_call": "The client made the call beside its task, for example for a title.",
    "superseded": "A later revision of the reward replaced this one before it was trained.",
    "already_trained": "The revision was trained before.",
    "withdrawn": "The feedback was withdrawn.",
    "unchanged": "The revision changes nothing that was trained.",
    "invalid": "The experience does not fit the model, for example by its tokens.",
    "retried": "The client repeated the call, and only the last answer counts.",
}


def describe_reason(reason: str) -> str:
    """Return a sentence that explains a reason why turns are not trained, such as `stale` or
    `truncated_sampling (grammar)`.
    """
    name = reason.partition(" (")[0]
    return _MEANINGS.get(name) or remedy(name, LEFT_OUT_REMEDIES | DROP_REMEDIES)


def remedy(reason: str, remedies: Mapping[str, str]) -> str:
    """Return a sentence with the remedy for a reason why turns are not trained.

    Args:
        reason: the reason, such as `stale`.
        remedies: remedy by reason. For other reasons the sentence points to the documentation.
    """
    clause = remedies.get(reason, "read the pitfalls about this reason in the documentation")
    return f"{clause[:1].upper()}{clause[1:]}."


def sessions_query(reason: str) -> str:
    """Return the URL query that lists the sessions dropped for `reason`; for `eval` it includes evaluation sessions."""
    return urlencode({"status": "dropped"} | ({"evaluation": "shown"} if reason == "eval" else {}))
