"""An agent practises tasks: runs in groups, their rewards, and the trainer's step on them.

    async for step in practise(stack, tasks, play, group_size=8, tasks_per_step=4, steps=10):
        print(step.reward_mean, step.champion)

`play(task, run)` is one run of the agent: it calls the model through `run.openai()` and says by `run.reward` how it
went. Needs the extra `headrace[topics]`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_schemas.lazy import lazily

if TYPE_CHECKING:
    from headrace.practice.agents import asked, plugged
    from headrace.practice.outcomes import OutcomeWatch, SessionOutcome
    from headrace.practice.practising import practise
    from headrace.practice.runs import Run
    from headrace.practice.steps import Step
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "headrace.practice.agents": ("asked", "plugged"),
            "headrace.practice.outcomes": ("OutcomeWatch", "SessionOutcome"),
            "headrace.practice.practising": ("practise",),
            "headrace.practice.runs": ("Run",),
            "headrace.practice.steps": ("Step",),
        },
    )

__all__ = ["OutcomeWatch", "Run", "SessionOutcome", "Step", "asked", "plugged", "practise"]
