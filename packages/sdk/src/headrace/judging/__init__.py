"""Feedback signals under the names of AgentScope's article: rewards as functions, a judge's scores, people's
preferences.

What cannot be judged has no score: every failure is raised, and none is a 0.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from typing import Any

from headrace.errors import UsageError
from headrace.practice.agents import text_of
from headrace.stack import stack_for
from headrace.stack.connection import ENTERED, support
from headrace.stack.offline import train_rows
from headrace_schemas.plain_values import plain_number


class RewardFunction:
    """A reward of your own: override `compute`. Anything that takes a reward function takes one of these."""

    def compute(self, trajectory: Mapping[str, Any]) -> float:
        """The reward of one record (`headrace.rl.DataCollector`). To abstain, raise."""
        raise NotImplementedError

    def check_completion(self, trajectory: Mapping[str, Any]) -> dict[str, float]:
        """`score` 1 when the run ends with an answer and every tool call has a result, else 0."""
        last = trajectory["messages"][-1] if trajectory["messages"] else {}
        ended = last.get("role") == "assistant" and bool(str(last.get("content") or "").strip())
        return {"score": float(ended and all(call["result"] is not None for call in trajectory["tool_calls"]))}

    def check_accuracy(self, trajectory: Mapping[str, Any]) -> float:
        """1 when the last message holds the text `expected` of the record, else 0. Without one nobody knows: raises."""
        if trajectory.get("expected") is None:
            raise ValueError("the record has no `expected`; add it, or override check_accuracy")
        return float(str(trajectory["expected"]) in str(trajectory["messages"][-1]["content"]))

    def __call__(self, trajectory: Mapping[str, Any]) -> float:
        try:
            return plain_number(self.compute(trajectory))
        except TypeError as error:
            raise ValueError(f"compute returned no number: {error}") from None


class LLMJudge:
    """Another model scores an answer by your criteria, with the prompts and the strict reading of the judge service.

    `model` is asked at `base_url`, else at the stack that was entered, else at `OPENAI_BASE_URL`.
    """

    def __init__(
        self, model: str, criteria: Mapping[str, str], *, base_url: str | None = None, api_key: str | None = None
    ) -> None:
        entered = ENTERED.get()
        inside = base_url is None and entered is not None
        found = entered.base_url if inside and entered else base_url or os.environ.get("OPENAI_BASE_URL")
        if not found:
            raise UsageError("the judge has no endpoint; name its base_url, or enter a stack")
        self._endpoint = {"base_url": found, "model": model, "is_gateway": inside}
        self._key = api_key or os.environ.get("OPENAI_API_KEY", "")
        self.criteria = dict(criteria)

    def evaluate(self, user_input: str, agent_response: Any) -> dict[str, float]:
        """Each criterion and `total`, their mean, all from 1 to 5. Raises `HeadraceError` where there is no verdict:
        the judge abstained, could not be read, or was not reached."""
        judge = support("headrace_judge.once", "headrace-judge")
        scores: dict[str, float] = judge.scores(
            self._endpoint, self._key, self.criteria, user_input, text_of(agent_response)
        )
        return {**scores, "total": math.fsum(scores.values()) / len(scores)}


class HumanPreferenceCollector:
    """Asks a person which of two answers is better: at the terminal, or by `ask(question, a, b)`, which returns "a",
    "b" or None for neither."""

    def __init__(self, ask: Callable[[str, str, str], str | None] | None = None) -> None:
        self._ask = ask or _at_the_terminal

    def collect(self, question: str, response_a: Any, response_b: Any) -> dict[str, str] | None:
        """{"prompt", "chosen", "rejected"}; None: the person preferred neither, and that is no preference."""
        a, b = text_of(response_a), text_of(response_b)
        said = (self._ask(question, a, b) or "").strip().lower()
        if said not in ("a", "b", ""):
            raise ValueError(f"the answer is a, b or nothing, not {said!r}")
        chosen, rejected = (a, b) if said == "a" else (b, a)
        return {"prompt": question, "chosen": chosen, "rejected": rejected} if said else None


class DPOTrainer:
    """Direct preference optimization on what was collected. Uses the stack that was entered, or a private one of
    `base`."""

    def __init__(self, base: str | None = None, settings: Mapping[str, object] | None = None, epochs: int = 1) -> None:
        self._base, self._settings, self._epochs = base, dict(settings or {}), epochs
        self.preferences: list[dict[str, str]] = []

    def add_preference(self, preference: Mapping[str, str] | None) -> None:
        """None, the preference for neither, is passed over."""
        if preference is not None:
            self.preferences.append(dict(preference))

    def train(self) -> str:
        """One job on everything that was added. Returns its version once the registry has decided about it. Where it
        serves, the stack's own trainer learns nothing from its answers: they are not of that trainer's lineage."""
        if not self.preferences:
            raise UsageError("there are no preferences; add_preference comes first")
        with stack_for(self._base, {}) as stack:
            return train_rows(stack, "dpo", self.preferences, epochs=self._epochs, settings=self._settings)


def _at_the_terminal(question: str, a: str, b: str) -> str:
    return input(f"{question}\n\nA: {a}\n\nB: {b}\n\nWhich is better, a or b? (neither: Enter) ")
