"""`MathAgentTrainer`: problems with one right answer, rewarded for correctness, brevity and format."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.blocking import blocking
from headrace_integrations.practice.runs import Run, call_agent, part_values, plugged, text_of
from headrace_integrations.practice.training import Step, train_on_tasks
from headrace_integrations.rl.training import TrinityRFT
from headrace_operations.arguments import whole_number

PARTS = {"correctness": 3.0, "steps_penalty": -0.1, "format_bonus": 0.5}
_STEP = re.compile(r"^[^\S\n]*+(?:step\s*+\d+|\d+[.)])", re.IGNORECASE | re.MULTILINE)
_THOUGHT = re.compile(r"^[^\S\n]*+(?:thought|think)\b", re.IGNORECASE | re.MULTILINE)
_ANSWER = re.compile(r"^[^\S\n]*+(?:final\s++)?answer\s*+[:=]\s*+(\S.*)", re.IGNORECASE | re.MULTILINE)


class MathAgentTrainer:
    """Trainer for an agent that solves maths problems.

    The expected format is one line `Thought`, numbered steps, and one line `Answer:`.

    Args:
        reward_function: reward for a right answer, for each numbered step, and for the expected format.
        training_config: as for `TrinityRFT`; `epochs` counts passes over all problems.
    """

    def __init__(
        self,
        algorithm: str,
        model_config: Mapping[str, Any] | None = None,
        reward_function: Mapping[str, float] | None = None,
        training_config: Mapping[str, Any] | None = None,
        settings: Mapping[str, object] | None = None,
    ) -> None:
        self.worth = part_values(PARTS, reward_function)
        self.framework = TrinityRFT(algorithm, model_config, training_config, settings)

    def parts(self, answer: str, expected: str) -> dict[str, float]:
        """Return the parts of the reward of one answer by name. Their sum is the reward."""
        counts = measured(answer, expected)
        counted = zip(PARTS, (counts["accuracy"], counts["steps"], counts["format"]), strict=True)
        return {name: self.worth[name] * count for name, count in counted}

    def train(self, agent: Any, problems: Sequence[Mapping[str, Any]], group_size: int = 8) -> list[Step]:
        """Train on problems {"question", "answer"} until the epochs are over. The agent plays one run at a time."""
        stack = self.framework.stack
        batch = int(stack.settings()["trainer.batch_experiences"])
        group_size = whole_number("group_size", group_size)
        tasks_per_step = min(len(problems), max(1, batch // group_size))
        steps = -(-len(problems) * self.framework.epochs // tasks_per_step)

        async def play(task: Mapping[str, Any], run: Run) -> None:
            with plugged(agent, stack.base_url, run.session().headers, run.model, stack.api_key):
                answer = text_of(await call_agent(agent, str(task["question"])))
            run.reward(parts=self.parts(answer, str(task["answer"])), metrics=measured(answer, str(task["answer"])))

        async def all_steps() -> list[Step]:
            sizes = {"group_size": group_size, "tasks_per_step": tasks_per_step, "steps": steps, "at_once": 1}
            return [step async for step in train_on_tasks(stack, problems, play, **sizes)]

        return blocking(all_steps())


def measured(answer: str, expected: str) -> dict[str, float]:
    """Return the numbers `accuracy` (1 if the answer is right), `steps` and `format` (1 if it has the expected
    format).
    """
    answer_lines = _ANSWER.findall(answer)
    has_format = len(answer_lines) == 1 and len(_THOUGHT.findall(answer)) == 1 and bool(_STEP.search(answer))
    is_right = bool(answer_lines) and _same_answer(answer_lines[-1], expected)
    return {"accuracy": float(is_right), "steps": float(len(_STEP.findall(answer))), "format": float(has_format)}


def _same_answer(answer: str, expected: str) -> bool:
    try:
        return float(answer) == float(expected)
    except ValueError:
        return " ".join(answer.split()).lower() == " ".join(expected.split()).lower()
