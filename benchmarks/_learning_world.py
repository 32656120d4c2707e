"""The demo in one process: its agent plays on the real engine, and its episodes become experiences as in the services.

Prompts, sampling and answers are those of `headrace_inference`, branches those of `headrace_collector`, rewards those
of the demo under the scorer's policy (`headrace_scorer`), and tasks and agent those of `examples/email_agent`. HTTP,
the bus and the databases are left out.
"""

from __future__ import annotations

import itertools
import tomllib
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import cast

from benchmarks._engine_world import EngineWorld
from email_agent import mailbox, rewards, typed
from email_agent.react import AGENT, Episode
from email_agent.tasks import Split, Task, stream, tasks
from email_agent.tools import Mailtools
from example_parts.react import Agent
from headrace_collector.trajectories import build_trajectory
from headrace_inference.torch_engine.engine import TorchEngine
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import Experience, Feedback, Trajectory, Turn
from headrace_schemas.programs.gate import Tasks
from headrace_schemas.values.base import utcnow
from headrace_scorer.answer_remarks import Corrections
from headrace_scorer.reward_policy import RewardPolicy, SourceReward
from headrace_scorer.scores import experience

SETTINGS = tomllib.loads(Path("examples/email_agent/headrace.toml").read_text(encoding="utf-8"))
MODEL = str(SETTINGS["trainer"]["model"])
RewardFunctions = Mapping[str, Callable[..., float | None]]
FUNCTIONS: RewardFunctions = {f"function:{name}": getattr(rewards, name) for name in ("answer", "evidence", "tool_use")}
TYPED_FUNCTIONS: RewardFunctions = {**FUNCTIONS, "function:answer": typed.answer}
"""The demo's reward functions, for an agent that answers with a call of `final_answer`."""
POLICY = RewardPolicy(SETTINGS["scorer"]["weights"], SETTINGS["scorer"]["required"])


class World(EngineWorld[Task]):
    """The mailbox of one seed, with an engine. `open` creates it."""

    agent: Agent = AGENT
    model = MODEL
    functions: RewardFunctions = FUNCTIONS

    def __init__(self, seed: int, blobs: BlobStore, folder: Path, engine: TorchEngine) -> None:
        self._box = mailbox.generate(seed)
        self.tools = Mailtools(self._box.open())
        super().__init__(seed, blobs, folder, engine)
        self.tasks = Tasks(gate=self._names("gate"), audit=self._names("audit"))
        """Task names of the gate program; with `play` the world can run a trial."""

    def questions(self, split: str) -> Iterator[Task]:
        return stream(self._box, cast(Split, split), self.seed)

    def tools_of(self, task: Task) -> Mailtools:
        return self.tools

    def is_right(self, task: Task, episode: Episode) -> bool:
        return episode.answer is not None and rewards.same_answer(episode.answer, task.expected)

    async def collect(self, version: str, episodes: int) -> list[Experience]:
        """Play episodes of the training traffic and return their experiences, in the order of the tasks."""
        runs = await self.play_all(version, list(itertools.islice(self.training_tasks, episodes)))
        return [experience for run in runs for experience in experiences_of(run.task, run.turns, self.functions)]

    async def play(self, version: str, task: str, seed: int) -> float:
        run = await self.play_once(version, self._tasks_by_id[task], seed)
        return float(self.is_right(run.task, run.episode))

    def _names(self, split: Split) -> tuple[str, ...]:
        return tuple(task.id for task in tasks(self._box, split))

    @cached_property
    def _tasks_by_id(self) -> dict[str, Task]:
        return {task.id: task for split in ("gate", "audit") for task in tasks(self._box, split)}


class TypedWorld(World):
    """The mailbox for an agent with typed answers. `tool_choice` is `required`."""

    agent = typed.TypedAgent(AGENT.system, typed.DEFINITIONS, AGENT.turns_max)
    functions = TYPED_FUNCTIONS


class FreeTypedWorld(TypedWorld):
    """The same agent without a grammar: nothing holds its calls to their form."""

    agent = replace(TypedWorld.agent, required=False)


def experiences_of(task: Task, turns: Sequence[Turn], functions: RewardFunctions = FUNCTIONS) -> list[Experience]:
    """Return the experiences that collector and scorer make of an episode and its feedback."""
    feedback = Feedback(
        time=utcnow(),
        feedback_id=uuid.uuid4().hex,
        session_key=turns[0].session_key,
        msg_ids=tuple(turn.turn_id for turn in turns),
        task_id=task.kind,
        context={"expected": task.expected},
    )
    run = trajectory_of(turns, [feedback])
    return scored_experiences(run, [*function_rewards(run, functions)], {}, POLICY)


def trajectory_of(turns: Sequence[Turn], feedback: Sequence[Feedback]) -> Trajectory:
    """Return the trajectory that the collector makes of a closed run and its feedback."""
    return build_trajectory(
        turns,
        superseded=(),
        about_run=feedback,
        about_session=[],
        reason="feedback",
        models=1,
        turns_from=0,
        now=utcnow(),
    )


def function_rewards(run: Trajectory, functions: RewardFunctions = FUNCTIONS) -> Iterator[SourceReward]:
    """Yield the results of the demo's reward functions for a run."""
    for name, function in functions.items():
        needs_context = name != "function:tool_use"
        yield SourceReward(name, None, "scored", function(run, run.context) if needs_context else function(run))


def scored_experiences(
    run: Trajectory, source_rewards: Sequence[SourceReward], details: Corrections, policy: RewardPolicy
) -> list[Experience]:
    """Return the experiences that the scorer makes, one for each branch."""
    return [
        experience(
            run,
            index,
            source_rewards,
            details,
            policy,
            rewarded=False,
            now=utcnow(),
            revision=0,
            task_id=run.task_id,
            run_id=run.run_id,
            parts=run.parts,
        )
        for index in range(len(run.branches))
    ]
