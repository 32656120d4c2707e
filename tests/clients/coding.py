"""Coding agents that improve: Claude Code and Codex CLI repair generated repositories on a stack that trains.

In each round both agents repair ten repositories with a generated bug. The result of the tests is the reward of the
run, and each round becomes a version. One process of each agent runs from before the first round until after the last
one, and repairs a repository before the training and once more after it. The system prompts of the agents are replaced
by short ones and the tools are reduced (`tests.clients.repairs`), because a tiny model reads them on a CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from headrace.registry import ModelRegistry
from headrace_operations.from_topics import read_turn_account
from headrace_operations.turn_account import TurnAccount
from headrace_schemas import Experience, TrainingMetrics, Trajectory, Turn
from headrace_schemas.events.trajectory import SIDE_CALL
from tests.clients import lesson
from tests.clients.program import environment_problem
from tests.clients.repairs import AGENT_KINDS, TASK, Agent, AgentFailed, Bug, generate_bugs
from tests.e2e.circle import Observed, observe
from tests.support.service_process import HeadraceUp
from tests.system.program import ROOT, Line, Program, Run, at_least, at_most, equals, no_problems, none_of

MODEL = "coder"
_SHOWN_SETS = 3
"""Sets of ten bugs that each agent demonstrates."""
_VERSION_S = 60.0
_SETTLE_S = 120.0
_STICKY_S = 3.0
_MISMATCH_MAX = 1e-3
_GAIN_MIN = 8
"""Bugs of 40 that the last two rounds repair in addition to the first two. Agents that learn nothing reach it in one of
thirty plays."""
_CALLS = ("messages", "responses")
"""Routes whose answers are turns."""
_WATCHED = ("health", "metrics")
"""Routes that the supervisor reads, also while the gateway starts."""


@dataclass
class Outcome:
    """Results of the runs of all agents."""

    rewards: dict[str, float] = field(default_factory=dict)
    """Result of the tests by session."""
    repaired: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Number of repaired repositories of each round, by agent."""
    resumed: list[str] = field(default_factory=list)
    """Sessions of the agents that ran from the beginning to the end."""
    problems: list[str] = field(default_factory=list)
    versions: int = 0
    """Versions that became champion."""


class Repairs:
    """Agents at work on one stack."""

    def __init__(self, run: Run, up: HeadraceUp, programs: Path) -> None:
        self._run = run
        self._up = up
        self._programs = programs
        self._url = up.base_url.removesuffix("/v1")
        self.outcome = Outcome()

    async def play(self, rounds: int) -> None:
        """Play the rounds while one process of each agent keeps running."""
        async with contextlib.AsyncExitStack() as stack:
            first = self._champion()
            running = [
                await self._begin(stack, kind, bug) for kind, bug in zip(AGENT_KINDS, self._bugs(), strict=False)
            ]
            for number in range(rounds):
                bugs = self._bugs()
                champion = self._champion()
                await asyncio.gather(*(self._round(kind, bugs, number) for kind in AGENT_KINDS))
                counts = {name: repaired[-1] for name, repaired in self.outcome.repaired.items()}
                print(f"round {number + 1}: repaired {counts} of {len(bugs)}", flush=True)
                await self._wait_for_successor(champion)
            if self._champion() == first:
                self.outcome.problems.append(f"no version replaced {first}")
            await asyncio.sleep(_STICKY_S + 1)
            for agent, bug in running:
                await self._repair(agent, bug)
                await self._reward(agent, bug)
                self.outcome.resumed.append(agent.session_id)

    def _bugs(self) -> list[Bug]:
        return generate_bugs(self._run.draw)

    async def _begin(self, stack: contextlib.AsyncExitStack, kind: type[Agent], bug: Bug) -> tuple[Agent, Bug]:
        agent = self._agent(kind, bug, "running")
        await stack.enter_async_context(agent)
        await self._repair(agent, bug)
        return agent, bug

    async def _round(self, kind: type[Agent], bugs: Sequence[Bug], number: int) -> None:
        repaired = 0
        for position, bug in enumerate(bugs):
            agent = self._agent(kind, bug, f"{number}-{bug.function}-{position}")
            async with agent:
                await self._repair(agent, bug)
            repaired += await self._reward(agent, bug)
        self.outcome.repaired[kind.name].append(repaired)

    def _agent(self, kind: type[Agent], bug: Bug, name: str) -> Agent:
        agent = kind(self._programs, self._url, self._run.folder / kind.__name__ / name)
        bug.write(agent.repository)
        return agent

    async def _repair(self, agent: Agent, bug: Bug) -> None:
        try:
            await agent.ask(TASK)
        except AgentFailed as failure:
            self.outcome.problems.append(f"{bug.function}: {failure}")

    async def _reward(self, agent: Agent, bug: Bug) -> bool:
        """Send the result of the tests as feedback that ends the run."""
        repaired = await asyncio.to_thread(bug.is_repaired, agent.repository)
        task_id = agent.name  # a run is compared with those of the same agent, whose prompts are alike
        body = {
            "session_id": agent.session_id, "task_id": task_id, "value": float(repaired), "ends_session": True,
        }  # fmt: skip
        async with httpx2.AsyncClient(trust_env=False) as http:
            (await http.post(f"{self._url}/v1/feedback", json=body)).raise_for_status()
        self.outcome.rewards[agent.session_id] = float(repaired)
        return repaired

    async def _wait_for_successor(self, champion: str | None) -> None:
        deadline = time.monotonic() + _VERSION_S
        while self._champion() == champion:
            if time.monotonic() > deadline:
                return
            await asyncio.sleep(0.5)
        self.outcome.versions += 1

    def _champion(self) -> str | None:
        with ModelRegistry(self._up.state.services["registry"].url) as registry:
            return registry.model(MODEL).champion


def play(run: Run) -> None:
    import torch

    environments: Path = run.options.environments
    if problem := environment_problem(environments, "node"):
        run.skip("all", problem)
        return
    programs = environments / "node" / "node_modules" / ".bin"
    bugs = [bug for _ in range(_SHOWN_SETS) for bug in generate_bugs(run.draw)]
    print("recording demonstrations", flush=True)
    demonstrations = run.folder / "demonstrations"
    demonstrations.mkdir()
    conversations = asyncio.run(lesson.record(programs, demonstrations, run.draw, bugs))
    torch.set_num_threads(1)
    with run.progress(run.options.warm_up, "steps") as progress:
        base = lesson.build(run.folder / "base", conversations, run.options.warm_up, run.seed, progress.advance)
    up = _stack(run.folder, base)
    up.start()
    try:
        repairs = Repairs(run, up, programs)
        asyncio.run(repairs.play(run.options.rounds))
        account = _settle(up)
        observed = asyncio.run(observe(up.state.bus))
        metrics = _gateway_metrics(up)
    finally:
        up.stop()
    outcome = repairs.outcome
    run.figures |= {"repaired": dict(outcome.repaired), "demonstrations": len(conversations)}
    run.add(
        *_request_lines(outcome, metrics, account), *_run_lines(outcome, observed), *_training_lines(outcome, observed)
    )


def _stack(folder: Path, base: Path) -> HeadraceUp:
    settings = {
        "trainer.model": MODEL,
        "trainer.base": str(base),
        "trainer.batch_experiences": 2 * 10,
        "trainer.batch_experiences_min": 1,
        "trainer.batch_wait_s": 90.0,  # longer than a round, whose runs are one batch
        "trainer.steps_per_version": 1,
        "trainer.max_staleness": 16,  # the agents that keep running begin before the first version
        "trainer.optimizer.learning_rate": 5e-4,
        "trainer.loss.updates_per_step": 2,
        "trainer.loss.kl": 0.05,  # keeps the steps of a repair, which the first versions would unlearn
        "scorer.reward_wait_s": 1.0,
        "collector.idle_s": 600.0,
        "gateway.sticky.idle_s": _STICKY_S,
    }
    config = folder / "headrace.toml"
    config.write_text("", encoding="utf-8")
    return HeadraceUp(folder / "data", config, settings, {})


def _settle(up: HeadraceUp) -> TurnAccount:
    """Return the account once each captured turn is trained or dropped."""
    deadline = time.monotonic() + _SETTLE_S
    while (account := asyncio.run(read_turn_account(up.state.bus))).waiting and time.monotonic() < deadline:
        time.sleep(1)
    return account


def _gateway_metrics(up: HeadraceUp) -> str:
    """Return the metrics of the gateway, which the token of the stack protects."""
    token = (up.folder / "run" / "token").read_text(encoding="utf-8").strip()
    url, headers = f"{up.state.services['gateway'].url}/metrics", {"Authorization": f"Bearer {token}"}
    return httpx2.get(url, headers=headers, trust_env=False).raise_for_status().text


def _request_lines(outcome: Outcome, metrics: str, account: TurnAccount) -> Iterator[Line]:
    requests = [
        (sample.labels["route"], int(sample.labels["status"]), int(sample.value))
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        if sample.name == "headrace_gateway_requests_total" and sample.labels["route"] not in _WATCHED
    ]
    failed = {f"{route} {status}": count for route, status, count in requests if status >= 400}
    total = sum(count for _, _, count in requests)
    answered = sum(count for route, status, count in requests if route in _CALLS and status == 200)
    yield no_problems("each agent finishes its work", outcome.problems)
    yield Line("failed requests", f"{sum(failed.values())} of {total}", "0", not failed and total > 0, {"by": failed})
    yield equals("captured calls", account.captured, answered)
    side_calls = account.dropped.get(SIDE_CALL, 0)
    yield equals("turns trained, all but side calls", account.trained, account.captured - side_calls)
    others = sum(account.waiting.values()) + sum(account.dropped.values()) - side_calls
    yield Line("turns that wait or are dropped for other reasons", str(others), "0", others == 0,
               {"waiting": account.waiting, "dropped": account.dropped})  # fmt: skip


def _run_lines(outcome: Outcome, observed: Observed) -> Iterator[Line]:
    turns = {turn.turn_id: turn for turn in observed.all(Turn)}
    trajectories = {event.trajectory_id: event for event in observed.all(Trajectory)}.values()
    task_runs = [trajectory for trajectory in trajectories if trajectory.untrained != SIDE_CALL]
    runs: dict[str, int] = defaultdict(int)
    for trajectory in task_runs:
        runs[trajectory.session_id] += 1
    split = sum(runs[session_id] != 1 for session_id in outcome.rewards)
    yield none_of("runs that are not one trajectory", split + len(runs.keys() - outcome.rewards.keys()), len(runs))
    yield none_of("runs with more than one branch", sum(len(item.branches) != 1 for item in task_runs), len(task_runs))
    offered = {name: bool(turn.tools) for name, turn in turns.items()}
    kinds = [(name, item.untrained == SIDE_CALL) for item in trajectories for name in item.turn_ids]
    yield none_of("side calls in a run, or calls of a run beside it",
                  sum(offered[name] == is_side_call for name, is_side_call in kinds), len(kinds))  # fmt: skip
    yield at_least("side calls", sum(is_side_call for _, is_side_call in kinds), 1)
    spans = [_is_exact(turns[span.turn_id], branch.token_ids, span.start, span.stop)
             for item in task_runs for branch in item.branches for span in branch.spans]  # fmt: skip
    yield none_of("turns whose tokens differ from those of the engine", spans.count(False), len(spans))
    for session_id in outcome.resumed:
        versions = {turn.version for turn in turns.values() if turn.session_id == session_id}
        yield at_least(f"versions that answered the running agent {session_id[:8]}", len(versions), 2)


def _is_exact(turn: Turn, token_ids: Sequence[int], start: int, stop: int) -> bool:
    """Return whether a branch has the prompt of a turn followed by its sampled tokens."""
    sampled = tuple(token_ids[start:stop]) == tuple(turn.choices[0].token_ids)
    return sampled and tuple(token_ids[:start]) == tuple(turn.prompt_token_ids)


def _training_lines(outcome: Outcome, observed: Observed) -> Iterator[Line]:
    experiences = {event.session_id: event for event in observed.all(Experience)}
    wrong = [
        name for name, reward in outcome.rewards.items()
        if name not in experiences or experiences[name].reward is None or experiences[name].reward != reward
    ]  # fmt: skip
    yield none_of("runs whose reward is not the result of their tests", len(wrong), len(outcome.rewards))
    mismatches = [
        event.metrics["mismatch_mean"] for event in observed.all(TrainingMetrics) if "mismatch_mean" in event.metrics
    ]
    yield at_most("difference of the engine's and the trainer's logprobs", max(mismatches, default=1.0), _MISMATCH_MAX)
    yield at_least("versions that became champion", outcome.versions, 1)
    repaired = [sum(counts) for counts in zip(*outcome.repaired.values(), strict=True)]
    yield at_least("bugs repaired in the last two rounds above the first two",
                   sum(repaired[-2:]) - sum(repaired[:2]), _GAIN_MIN)  # fmt: skip


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=12, help="rounds of ten repositories for each agent")
    parser.add_argument("--warm-up", type=int, default=300, help="steps of the warm-up of the model")
    parser.add_argument("--environments", type=Path, default=ROOT / ".cache" / "clients", help="folder of the packages")


PROGRAM = Program("coding agents that repair repositories and are trained on the results", play, _add_arguments)
