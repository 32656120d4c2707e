"""Training of an agent on tasks: each step plays groups of runs, sends their rewards, and waits for the training.

    async for step in train_on_tasks(stack, tasks, play, group_size=8, tasks_per_step=4, steps=10):
    print(step.reward_mean, step.champion)

`play(task, run)` is one run of the agent. It calls the model through `run.openai()` and reports the reward with
`run.reward`. Needs the extra `headrace-client[topics]`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_schemas.lazy import lazy_exports

if TYPE_CHECKING:
    from headrace_integrations.practice.runs import Run, asked, call_agent, plugged
    from headrace_integrations.practice.training import OutcomeWatch, SessionOutcome, Step, practise, train_on_tasks
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "headrace_integrations.practice.runs": ("Run", "asked", "call_agent", "plugged"),
            "headrace_integrations.practice.training": (
                "OutcomeWatch",
                "SessionOutcome",
                "Step",
                "practise",
                "train_on_tasks",
            ),
        },
    )

__all__ = [
    "OutcomeWatch",
    "Run",
    "SessionOutcome",
    "Step",
    "asked",
    "call_agent",
    "plugged",
    "practise",
    "train_on_tasks",
]
