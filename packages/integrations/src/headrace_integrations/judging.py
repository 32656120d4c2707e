"""Sources of feedback under the names of AgentScope's article: reward functions, an LLM judge, preferences of people.

Failures raise exceptions. A run that cannot be judged gets no score; it never gets a score of 0.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from typing import Any

from headrace.errors import UsageError
from headrace_integrations.practice.runs import text_of
from headrace_integrations.stack import stack_for
from headrace_integrations.stack.attaching import train_rows
from headrace_integrations.stack.connection import ENTERED, support
from headrace_schemas.values.text import plain_number

__all__ = ["DPOTrainer", "HumanPreferenceCollector", "LLMJudge", "RewardFunction"]


class RewardFunction:
    """Base class of reward functions, whose subclasses override `compute`.

    Instances can be passed as reward functions.
    """

    def compute(self, trajectory: Mapping[str, Any]) -> float:
        """Return the reward of a record of `headrace.rl.DataCollector`. An exception means that there is no reward."""
        raise NotImplementedError

    def check_completion(self, trajectory: Mapping[str, Any]) -> dict[str, float]:
        """Return `score` 1 if the run ends with an answer and every tool call has a result, else 0."""
        last = trajectory["messages"][-1] if trajectory["messages"] else {}
        ended = last.get("role") == "assistant" and bool(str(last.get("content") or "").strip())
        return {"score": float(ended and all(call["result"] is not None for call in trajectory["tool_calls"]))}

    def check_accuracy(self, trajectory: Mapping[str, Any]) -> float:
        """Return 1 if the last message contains the text `expected` of the record, else 0.

        Raises:
            ValueError: the record has no `expected`, so that the accuracy is unknown.
        """
        if trajectory.get("expected") is None:
            raise ValueError("the record has no `expected`; add it, or override check_accuracy")
        return float(str(trajectory["expected"]) in str(trajectory["messages"][-1]["content"]))

    def __call__(self, trajectory: Mapping[str, Any]) -> float:
        try:
            return plain_number(self.compute(trajectory))
        except TypeError as error:
            raise ValueError(f"compute returned no number: {error}") from None


class LLMJudge:
    """LLM judge: a model that scores answers by the `criteria`, a mapping of names to descriptions.

    Prompts and parsing are those of the judge service. The endpoint of `model` is `base_url`, or else the gateway of
    the entered stack, or else `OPENAI_BASE_URL`.
    """

    def __init__(
        self, model: str, criteria: Mapping[str, str], *, base_url: str | None = None, api_key: str | None = None
    ) -> None:
        entered = ENTERED.get()
        uses_gateway = base_url is None and entered is not None
        endpoint = entered.base_url if uses_gateway and entered else base_url or os.environ.get("OPENAI_BASE_URL")
        if not endpoint:
            raise UsageError("the judge has no endpoint; pass base_url, or enter a stack")
        self._endpoint = {"base_url": endpoint, "model": model, "is_gateway": uses_gateway}
        self._key = api_key or os.environ.get("OPENAI_API_KEY", "")
        self.criteria = dict(criteria)

    def evaluate(self, user_input: str, agent_response: Any) -> dict[str, float]:
        """Return a score from 1 to 5 for each criterion, and their mean as `total`.

        Raises:
            HeadraceError: there is no verdict, because the judge abstained, was unreachable or its answer could not be
                parsed.
        """
        judge = support("judge", "headrace-judge")
        scores: dict[str, float] = judge.scores(
            self._endpoint, self._key, self.criteria, user_input, text_of(agent_response)
        )
        return {**scores, "total": math.fsum(scores.values()) / len(scores)}


class HumanPreferenceCollector:
    """Collector of a person's preferences between two answers.

    The person answers at the terminal, or through the function `ask(question, a, b)`, which returns "a", "b" or None
    for neither.
    """

    def __init__(self, ask: Callable[[str, str, str], str | None] | None = None) -> None:
        self._ask = ask or _ask_at_terminal

    def collect(self, question: str, response_a: Any, response_b: Any) -> dict[str, str] | None:
        """Return {"prompt", "chosen", "rejected"}, or None if the person preferred neither answer."""
        a, b = text_of(response_a), text_of(response_b)
        answer = (self._ask(question, a, b) or "").strip().lower()
        if answer not in ("a", "b", ""):
            raise ValueError(f"answer = {answer!r}: must be a, b or empty")
        chosen, rejected = (a, b) if answer == "a" else (b, a)
        return {"prompt": question, "chosen": chosen, "rejected": rejected} if answer else None


class DPOTrainer:
    """Direct preference optimization on collected preferences.

    The trainer uses the entered stack, or a private stack of the model folder `base`.
    """

    def __init__(self, base: str | None = None, settings: Mapping[str, object] | None = None, epochs: int = 1) -> None:
        self._base, self._settings, self._epochs = base, dict(settings or {}), epochs
        self.preferences: list[dict[str, str]] = []

    def add_preference(self, preference: Mapping[str, str] | None) -> None:
        """Add a preference. None, the preference for neither answer, is ignored."""
        if preference is not None:
            self.preferences.append(dict(preference))

    def train(self) -> str:
        """Train on all added preferences in one offline job, and return its version once the registry has decided about
        it.

        If that version becomes champion, the stack's own trainer does not train on its answers, because they belong to
        another lineage.
        """
        if not self.preferences:
            raise UsageError("preferences: must not be empty; call add_preference first")
        with stack_for(self._base, {}) as stack:
            return train_rows(stack, "dpo", self.preferences, epochs=self._epochs, settings=self._settings)


def _ask_at_terminal(question: str, a: str, b: str) -> str:
    return input(f"{question}\n\nA: {a}\n\nB: {b}\n\nWhich is better, a or b? (neither: Enter) ")
