"""What a shadow has found, as it is kept with its rollout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

from pydantic import Field

from headrace_registry.shadow.estimate import ShadowEstimate
from headrace_registry.shadow.expectations import Expectations
from headrace_schemas.base import Finite, Model, Text
from headrace_schemas.rollout_api import ShadowState


class ShadowFindings(Model):
    """Stored as JSON; empty while there is no shadow, or it goes on."""

    state: ShadowState | None = None
    expected: dict[Text, dict[str, tuple[Finite, Finite]]] = Field(default_factory=dict)
    """`Expectations.table`."""

    @classmethod
    def of(
        cls,
        found: ShadowEstimate,
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
            pairs=found.pairs,
            spoke=found.spoke,
            ended=dict(ended),
            left_out=dict(left_out),
            tokens=tokens,
            judged=found.judged,
            effective=found.overlap.effective,
            mean_weight=found.overlap.mean,
            difference=found.difference,
            lower=found.lower,
            upper=found.upper,
            refused=found.refused,
        )
        return cls(state=state, expected={metric: dict(seen) for metric, seen in expected.items()})

    @property
    def expectations(self) -> Expectations:
        return Expectations({metric: dict(seen) for metric, seen in self.expected.items()})

    def statistics(self) -> dict[str, float]:
        """For the decision that ends the shadow."""
        one = self.state
        if one is None:
            return {}
        numbers = {
            "shadow.prompts": float(one.prompts),
            "shadow.pairs": float(one.pairs),
            "shadow.spoke": float(one.spoke),
            "shadow.effective": one.effective,
            "shadow.mean_weight": one.mean_weight,
            "shadow.judged_difference": one.judged,
            "shadow.difference": one.difference,
            "shadow.lower": one.lower,
            "shadow.upper": one.upper,
        }
        return {name: value for name, value in numbers.items() if value is not None}

    def in_words(self) -> str:
        """For its reason."""
        one = self.state
        if one is None:
            return "no shadow"
        if one.refused is not None:
            return f"nothing said about users ({one.refused})"
        return f"users would be {one.difference:+.3f} satisfied, in [{one.lower:+.3f}, {one.upper:+.3f}]"
