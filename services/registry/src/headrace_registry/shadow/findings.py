"""Findings of a shadow, as they are stored with its rollout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

from pydantic import Field

from headrace_registry.shadow.estimate import ShadowEstimate
from headrace_registry.shadow.expectations import Expectations
from headrace_schemas.http.rollout_api import ShadowState
from headrace_schemas.values.base import Finite, Model, Text


class ShadowFindings(Model):
    """Findings as JSON; empty without a shadow and while it is under way."""

    state: ShadowState | None = None
    expected: dict[Text, dict[str, tuple[Finite, Finite]]] = Field(default_factory=dict)
    """`Expectations.table`."""

    @classmethod
    def of(
        cls,
        estimate: ShadowEstimate,
        *,
        prompts: int,
        read: int,
        ended: Mapping[str, int],
        left_out: Mapping[str, int],
        tokens: int,
        expected: Mapping[str, Mapping[str, tuple[float, float]]],
    ) -> Self:
        state = ShadowState(
            prompts=prompts,
            read=read,
            pairs=estimate.pairs,
            spoke=estimate.spoke,
            ended=dict(ended),
            left_out=dict(left_out),
            tokens=tokens,
            judged=estimate.judged,
            effective=estimate.overlap.effective,
            mean_weight=estimate.overlap.mean,
            difference=estimate.difference,
            lower=estimate.lower,
            upper=estimate.upper,
            refused=estimate.refused,
        )
        return cls(state=state, expected={metric: dict(by_kind) for metric, by_kind in expected.items()})

    @property
    def expectations(self) -> Expectations:
        return Expectations({metric: dict(by_kind) for metric, by_kind in self.expected.items()})

    def statistics(self) -> dict[str, float]:
        """Return the statistics for the decision that ends the shadow."""
        state = self.state
        if state is None:
            return {}
        numbers = {
            "shadow.prompts": float(state.prompts),
            "shadow.pairs": float(state.pairs),
            "shadow.spoke": float(state.spoke),
            "shadow.effective": state.effective,
            "shadow.mean_weight": state.mean_weight,
            "shadow.judged_difference": state.judged,
            "shadow.difference": state.difference,
            "shadow.lower": state.lower,
            "shadow.upper": state.upper,
        }
        return {name: value for name, value in numbers.items() if value is not None}

    def in_words(self) -> str:
        """Return the findings as part of the decision's reason."""
        state = self.state
        if state is None:
            return "no shadow"
        if state.refused is not None:
            return f"no estimate about users ({state.refused})"
        return f"users would be {state.difference:+.3f} satisfied, in [{state.lower:+.3f}, {state.upper:+.3f}]"
