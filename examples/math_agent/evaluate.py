"""Play held-out problems for the registry's gate, or against one version, and print a line of JSON for each.

    python -m math_agent.evaluate --base-url http://127.0.0.1:8000/v1 --gate
    python -m math_agent.evaluate --base-url http://127.0.0.1:8000/v1 --model math-agent@0123456789abcdef

The score is whether the answer is right; steps and form are printed as well. `example_parts/examining.py` describes the
protocol with the gate.
"""

from __future__ import annotations

import argparse
import itertools

from openai import AsyncOpenAI

from example_parts import examining
from example_parts.react import Episode
from headrace.rewards import accuracy
from math_agent.solution import AGENT, Calculator, Problem, of_episode, stream


class Examination(examining.Examination[Problem]):
    """Examination with problems that occur neither in the warm-up nor in the agent's own traffic."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self._calculator = Calculator()

    def tasks(self, half: examining.Half) -> list[Problem]:
        return list(itertools.islice(stream(half, self.options.seed), self.options.tasks))

    async def play(self, client: AsyncOpenAI, version: str, task: Problem, seed: int) -> Episode:
        return await AGENT.play(client, version, self._calculator, task.question, self.options.max_tokens, seed)

    def result(self, task: Problem, episode: Episode) -> dict[str, object]:
        solution = of_episode(episode)
        return {
            "task": task.id,
            "score": accuracy(episode.answer or "", float(task.expected)),
            "steps": solution.steps,
            "format": float(solution.in_form),
            "solution": f"{task.question}\n{solution.as_text()}",
        }


def main() -> None:
    examining.main(Examination, "Play held-out problems against versions of the math agent's model.")


if __name__ == "__main__":
    main()
