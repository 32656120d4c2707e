"""The demo in one process: its agent plays on the real engine, and its episodes become experiences as in the services.

What is real: prompts, sampling and answers (`headrace_inference`), branches (`headrace_collector`), the demo's reward
functions under the scorer's policy (`headrace_scorer`), tasks and agent (`examples/email_agent`). What is left out:
HTTP, the bus and the databases between them.
"""

from __future__ import annotations

import itertools
import tomllib
import uuid
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import cast

from benchmarks._engine_world import EngineWorld
from email_agent import mailbox, rewards
from email_agent.react import AGENT, Episode
from email_agent.tasks import Split, Task, stream, tasks
from email_agent.tools import Mailtools
from headrace_collector.trajectories import trajectory
from headrace_inference.torch_engine.engine import TorchEngine
from headrace_runtime.blobs import BlobStore
from headrace_schemas import Experience, Feedback, Trajectory, Turn
from headrace_schemas.base import utcnow
from headrace_schemas.gate import Tasks
from headrace_scorer.answer_remarks import Given
from headrace_scorer.reward_policy import RewardPolicy, SourceReward
from headrace_scorer.scores import experience

SETTINGS = tomllib.loads(Path("examples/email_agent/headrace.toml").read_text(encoding="utf-8"))
MODEL = str(SETTINGS["trainer"]["model"])
FUNCTIONS = {f"function:{name}": getattr(rewards, name) for name in ("answer", "evidence", "tool_use")}
POLICY = RewardPolicy(SETTINGS["scorer"]["weights"], SETTINGS["scorer"]["required"])


class World(EngineWorld[Task]):
    """The mailbox of one seed, and an engine. `open` makes one."""

    agent, model = AGENT, MODEL

    def __init__(self, seed: int, blobs: BlobStore, folder: Path, engine: TorchEngine) -> None:
        self._box = mailbox.generate(seed)
        self.tools = Mailtools(self._box.open())
        super().__init__(seed, blobs, folder, engine)
        self.tasks = Tasks(gate=self._names("gate"), audit=self._names("audit"))
        """What the gate's program would name; with `play` this is a `Court`."""

    def questions(self, split: str) -> Iterator[Task]:
        return stream(self._box, cast(Split, split), self.seed)

    def tools_of(self, task: Task) -> Mailtools:
        return self.tools

    def right(self, task: Task, episode: Episode) -> bool:
        return episode.answer is not None and rewards.same_answer(episode.answer, task.expected)

    async def collect(self, version: str, episodes: int) -> list[Experience]:
        """What so many questions of the agent's own traffic come to, in the order in which they were asked."""
        runs = await self.played(version, list(itertools.islice(self.asked, episodes)))
        return [made for one in runs for made in experiences_of(one.task, one.turns)]

    async def play(self, version: str, task: str, seed: int) -> float:
        run = await self.play_once(version, self._known[task], seed)
        return float(self.right(run.task, run.episode))

    def _names(self, split: Split) -> tuple[str, ...]:
        return tuple(task.id for task in tasks(self._box, split))

    @cached_property
    def _known(self) -> dict[str, Task]:
        return {task.id: task for split in ("gate", "audit") for task in tasks(self._box, split)}


def experiences_of(task: Task, turns: Sequence[Turn]) -> list[Experience]:
    """As collector and scorer make them of an episode and its feedback."""
    told = Feedback(
        time=utcnow(),
        feedback_id=uuid.uuid4().hex,
        session_key=turns[0].session_key,
        msg_ids=tuple(turn.turn_id for turn in turns),
        task_id=task.kind,
        context={"expected": task.expected},
    )
    run = trajectory_of(turns, [told])
    return scored_experiences(run, [*rewarded(run)], {}, POLICY)


def trajectory_of(turns: Sequence[Turn], told: Sequence[Feedback]) -> Trajectory:
    """As the collector closes a run, with what was said of it."""
    return trajectory(
        turns, given_up=(), about_run=told, about_session=[], reason="feedback", models=1, turns_from=0, now=utcnow()
    )


def rewarded(run: Trajectory) -> Iterator[SourceReward]:
    """What the demo's reward functions say of it."""
    for name, function in FUNCTIONS.items():
        needs_context = name != "function:tool_use"
        yield SourceReward(name, None, "scored", function(run, run.context) if needs_context else function(run))


def scored_experiences(
    run: Trajectory, source_rewards: Sequence[SourceReward], given: Given, policy: RewardPolicy
) -> list[Experience]:
    """As the scorer makes them, one for each branch."""
    return [
        experience(
            run,
            index,
            source_rewards,
            given,
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
