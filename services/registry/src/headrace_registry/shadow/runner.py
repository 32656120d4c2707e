"""Has the prompts of shadows answered, beside the director's decisions; what is under way is in memory alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime
from typing import Protocol

from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_registry.leader import LeaderLease
from headrace_registry.metrics import SHADOW_PROMPTS
from headrace_registry.rollouts import kept, ledger
from headrace_registry.rollouts.kept import KeptRollout
from headrace_registry.rollouts.settings import RolloutSettings
from headrace_registry.shadow import prompts
from headrace_registry.shadow.prompts import ANSWERING, KeptPrompt, Side
from headrace_registry.shadow.recording import (
    Recording,
    WeighedTokens,
    first_run,
    is_opening,
    is_whole,
    log_weight,
    weighed,
)
from headrace_registry.shadow.rerun import Answering, ReadOnlyTools, RerunFailed, Toolbox, rerun
from headrace_runtime.isolation import is_fatal, reason_of
from headrace_runtime.logs import get_logger
from headrace_runtime.processor import Processor, StepFailed
from headrace_schemas import Event, Turn
from headrace_schemas.text import storable

log = get_logger(__name__)
_REASON_MAX = 200
_TURNS_MAX = 256


class ShadowAnswers(Protocol):
    """Whoever answers: the gateway, a program with tools, a replica for logprobs."""

    @property
    def tools(self) -> ReadOnlyTools: ...

    def session(self, tenant: str, session_id: str, of: str) -> AbstractAsyncContextManager[Answering]:
        """A session of the shadow of session `of`; it is ended when the body is."""

    async def logprobs(self, version: str, answers: Sequence[WeighedTokens]) -> list[list[float]] | None:
        """None: no replica that has the version says so. Raises `RerunFailed`."""

    async def stop(self) -> None: ...


class ShadowRunner:
    """`tick` in each round. A registry that dies begins the prompts that were under way anew, as another attempt."""

    def __init__(
        self,
        processor: Processor,
        lease: LeaderLease,
        settings: RolloutSettings,
        answers: ShadowAnswers,
        changed: Callable[[], None],
    ) -> None:
        self._processor = processor
        self._lease = lease
        self._settings = settings
        self._answers = answers
        self._changed = changed
        self._running: dict[tuple[str, int], asyncio.Task[None]] = {}

    async def tick(self, model: str) -> None:
        """Begin what is due, within `shadow.concurrency`. Raises errors that should end the process."""
        self._reap()
        async with self._processor.database.transaction() as tx:
            going_on = [one for one in await kept.under_way(tx, model) if one.phase == "shadow"]
        for rollout in going_on:
            room = self._settings.shadow.concurrency - len(self._running)
            if room <= 0:
                return
            async with self._processor.database.transaction() as tx:
                age_ms = round(rollout.plan.maturity_s * 1000)
                due = await prompts.due(tx, rollout, age_ms, room + len(self._running))
            fresh = [one for one in due if (one.rollout_id, one.place) not in self._running]
            for prompt in fresh[:room]:
                task = asyncio.create_task(self._answer(rollout, prompt))
                task.add_done_callback(lambda _: self._changed())
                self._running[prompt.rollout_id, prompt.place] = task

    async def settled(self) -> None:
        """Until nothing is under way: for tests, and for whoever wants to wait."""
        while self._running:
            await asyncio.gather(*self._running.values(), return_exceptions=True)
            self._reap()

    async def stop(self) -> None:
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._answers.stop()

    def _reap(self) -> None:
        for key, task in list(self._running.items()):
            if task.done():
                del self._running[key]
                try:
                    task.result()
                except StepFailed as error:
                    log.exception("shadow_postponed", error=str(error))

    async def _answer(self, rollout: KeptRollout, prompt: KeptPrompt) -> None:
        attempt = await self._begin(rollout, prompt)
        if attempt is None:
            return
        try:
            async with self._processor.database.transaction() as tx:
                events = await prompts.events(tx, prompt, "logged")
            turns = [turn for one in ledger.sessions(events[:_TURNS_MAX]) for turn in one.turns]
            await self._play(rollout, prompt, attempt, turns)
        except Exception as error:  # one prompt stops no other, whatever its sessions hold
            if is_fatal(error):
                raise
            reason = str(error) if isinstance(error, RerunFailed) else reason_of(error)
            log.warning("shadow_failed", rollout=prompt.rollout_id, place=prompt.place, error=reason)
            SHADOW_PROMPTS.labels(rollout.model, "failed").inc()
            if attempt >= self._settings.shadow.attempts:
                await self._leave_out(prompt, storable(reason)[:_REASON_MAX])

    async def _play(self, rollout: KeptRollout, prompt: KeptPrompt, attempt: int, turns: list[Turn]) -> None:
        run = first_run(turns)
        if not run or not is_opening(run[0]):
            await self._leave_out(prompt, "its session has no opening turn any more")
            return
        shadow = self._settings.shadow
        versions: dict[Side, str] = {"candidate": rollout.version, "champion": rollout.control}
        ended: dict[Side, str] = {}
        tokens = 0
        for side in ANSWERING:
            toolbox = Toolbox(frozenset(shadow.read_only_tools), self._answers.tools, Recording.of(turns))
            session = self._answers.session(prompt.tenant, prompt.session_id(side, attempt), prompt.session_key)
            async with session as asking:
                done = await rerun(asking, toolbox, versions[side], run[0], shadow.bounds)
            ended[side] = done.ended
            tokens += done.tokens
        weight = await self._weight(rollout.version, run) if is_whole(turns) else None

        async def keep(tx: AsyncConnection, _now: datetime) -> Sequence[Event]:
            await self._lease.check(tx)
            await prompts.answer(tx, prompt, attempt, ended, tokens, weight)
            return ()

        await self._processor.step(keep)
        SHADOW_PROMPTS.labels(rollout.model, "answered").inc()

    async def _weight(self, version: str, run: Sequence[Turn]) -> float | None:
        answers = weighed(run)
        said = await self._answers.logprobs(version, answers) if answers else None
        return log_weight(answers, said) if answers and said is not None else None

    async def _begin(self, rollout: KeptRollout, prompt: KeptPrompt) -> int | None:
        begun: list[int | None] = []

        async def work(tx: AsyncConnection, _now: datetime) -> Sequence[Event]:
            await self._lease.check(tx)
            begun[:] = [await prompts.begin(tx, prompt, rollout.observed_ms)]
            return ()

        await self._processor.step(work)
        return begun[0]

    async def _leave_out(self, prompt: KeptPrompt, reason: str) -> None:
        async def work(tx: AsyncConnection, _now: datetime) -> Sequence[Event]:
            await self._lease.check(tx)
            await prompts.leave_out(tx, prompt, reason)
            return ()

        await self._processor.step(work)
