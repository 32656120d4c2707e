"""Chooses prompts from the traffic while a rollout is in the shadow, and lets both versions answer them in separate
tasks. Which tasks are running is stored only in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime
from typing import Protocol

from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_registry.metrics import SHADOW_PROMPTS
from headrace_registry.rollouts.plan import RolloutPlan
from headrace_registry.rollouts.settings import EVENTS_PER_UNIT_MAX, RolloutSettings
from headrace_registry.shadow import prompts
from headrace_registry.shadow.prompts import ANSWERING, PromptRecord, ShadowPhase, Side
from headrace_registry.shadow.rerun import (
    ModelSession,
    ReadOnlyTools,
    Recording,
    RerunFailed,
    ScorableAnswer,
    Toolbox,
    first_run,
    is_opening,
    is_single_run,
    log_weight,
    rerun,
    scorable_answers,
)
from headrace_registry.storage import rollout_store, unit_store
from headrace_registry.storage.leader import LeaderLease
from headrace_registry.storage.rollout_store import RolloutRecord
from headrace_runtime.process.logs import get_logger
from headrace_runtime.storage.isolation import is_fatal, reason_of
from headrace_runtime.stream.processor import Processor, StepFailed
from headrace_schemas import Event, Turn
from headrace_schemas.values.text import storable

log = get_logger(__name__)
_REASON_MAX = 200
_TURNS_MAX = 256
_ATTEMPTS = 3
"""Number of attempts to answer a prompt, after which it is left out."""
_MINUTE_MS = 60_000
_PROMPT_TOKENS_MAX = 8192
"""Maximum tokens of a prompt. Longer prompts are left out."""


class ShadowAnswers(Protocol):
    """Clients for the answers of a shadow: model calls, read-only tools, and logprobs."""

    @property
    def tools(self) -> ReadOnlyTools: ...

    def session(self, tenant: str, session_id: str, of: str) -> AbstractAsyncContextManager[ModelSession]:
        """Open a session in which a version answers a prompt.

        Args:
            session_id: id of the new session.
            of: id of the user's session whose prompt is answered.
        """

    async def logprobs(self, version: str, answers: Sequence[ScorableAnswer]) -> list[list[float]] | None:
        """Return the logprobs of the answers' tokens under `version`, or None if no replica can compute them. Raises
        `RerunFailed`."""

    async def stop(self) -> None: ...


class ShadowRunner:
    """Runs the shadows of all models: both versions answer each chosen prompt, and the results are stored. Call `tick`
    in each round of the registry.

    After a crash, prompts in progress are answered again in another attempt.
    """

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
        """Begin to answer the prompts of a model that are due, a few at a time.

        Raises errors that must end the process.
        """
        self._reap()
        async with self._processor.database.transaction() as tx:
            rollouts = [
                record for record in await rollout_store.rollouts_under_way(tx, model) if record.phase == "shadow"
            ]
        for rollout in rollouts:
            free_slots = self._settings.shadow.concurrency - len(self._running)
            if free_slots <= 0:
                return
            async with self._processor.database.transaction() as tx:
                age_ms = round(rollout.plan.maturity_s * 1000)
                due_prompts = await prompts.due_prompts(tx, rollout, age_ms, free_slots + len(self._running))
            fresh = [record for record in due_prompts if (record.rollout_id, record.number) not in self._running]
            for prompt in fresh[:free_slots]:
                task = asyncio.create_task(self._answer(rollout, prompt))
                task.add_done_callback(lambda _: self._changed())
                self._running[prompt.rollout_id, prompt.number] = task

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

    async def _answer(self, rollout: RolloutRecord, prompt: PromptRecord) -> None:
        attempt = await self._begin(rollout, prompt)
        if attempt is None:
            return
        try:
            async with self._processor.database.transaction() as tx:
                events = await prompts.side_events(tx, prompt, "logged")
            sessions = await asyncio.to_thread(unit_store.session_records, events[:_TURNS_MAX])
            turns = [turn for session in sessions for turn in session.turns]
            await self._play(rollout, prompt, attempt, turns)
        except Exception as error:  # one prompt must not stop the others, whatever its sessions contain
            if is_fatal(error):
                raise
            reason = str(error) if isinstance(error, RerunFailed) else reason_of(error)
            log.warning("shadow_failed", rollout=prompt.rollout_id, place=prompt.number, error=reason)
            SHADOW_PROMPTS.labels(rollout.model, "failed").inc()
            if attempt >= _ATTEMPTS:
                await self._leave_out(prompt, storable(reason)[:_REASON_MAX])

    async def _play(self, rollout: RolloutRecord, prompt: PromptRecord, attempt: int, turns: list[Turn]) -> None:
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
            async with session as model:
                outcome = await rerun(model, toolbox, versions[side], run[0], shadow.bounds)
            ended[side] = outcome.ended
            tokens += outcome.tokens
        weight = await self._weight(rollout.version, run) if is_single_run(turns) else None

        async def keep(tx: AsyncConnection, _now: datetime) -> Sequence[Event]:
            await self._lease.check(tx)
            await prompts.record_answers(tx, prompt, attempt, ended, tokens, weight)
            return ()

        await self._processor.step(keep)
        SHADOW_PROMPTS.labels(rollout.model, "answered").inc()

    async def _weight(self, version: str, run: Sequence[Turn]) -> float | None:
        answers = scorable_answers(run)
        logprobs = await self._answers.logprobs(version, answers) if answers else None
        return log_weight(answers, logprobs) if answers and logprobs is not None else None

    async def _begin(self, rollout: RolloutRecord, prompt: PromptRecord) -> int | None:
        attempts: list[int | None] = []

        async def work(tx: AsyncConnection, _now: datetime) -> Sequence[Event]:
            await self._lease.check(tx)
            attempts[:] = [await prompts.begin_attempt(tx, prompt, rollout.observed_ms)]
            return ()

        await self._processor.step(work)
        return attempts[0]

    async def _leave_out(self, prompt: PromptRecord, reason: str) -> None:
        async def work(tx: AsyncConnection, _now: datetime) -> Sequence[Event]:
            await self._lease.check(tx)
            await prompts.leave_out(tx, prompt, reason)
            return ()

        await self._processor.step(work)


class PromptSampler:
    """Chooses prompts for shadows from the traffic.

    `sample` must be called with each turn, in the transaction that processes the turn.
    """

    def __init__(self, lease: LeaderLease, settings: RolloutSettings) -> None:
        self._lease = lease
        self._settings = settings

    async def sample(self, tx: AsyncConnection, turn: Turn) -> None:
        """If a turn begins a session that may be used, add the session as a prompt. Store the turn if its session is a
        prompt."""
        phases = await prompts.shadow_phases(tx, turn.model)
        if not phases:
            return
        await self._lease.check(tx)
        if self._may_be_sampled(turn):
            for phase in phases:
                if turn.version == phase.control and await self._needs_prompt(tx, phase):
                    await self._add(tx, phase, turn)
        for member in await unit_store.memberships(tx, turn.session_key, turn.tenant):
            if prompts.is_shadow(member):
                await unit_store.add_event(tx, member, turn, EVENTS_PER_UNIT_MAX)

    def _may_be_sampled(self, turn: Turn) -> bool:
        """Return whether the turn's prompt may be used: it opens a user's session, its tenant has agreed, and no
        rollout uses the session."""
        shadow = self._settings.shadow
        return (
            turn.purpose == "train"
            and turn.shadow_of is None
            and turn.delivered
            and turn.tenant in shadow.keys
            and (turn.assignment is None or turn.assignment.arm == "rest")
            and len(turn.choices) == 1
            and turn.usage.prompt_tokens <= _PROMPT_TOKENS_MAX
            and is_opening(turn)
        )

    async def _needs_prompt(self, tx: AsyncConnection, phase: ShadowPhase) -> bool:
        """Return whether the shadow needs another prompt now, within the limits on rate and tokens. Prompts that were
        left out are replaced by others."""
        count, left_out, tokens = await prompts.prompt_totals(tx, phase.rollout_id)
        shadow = self._settings.shadow
        allowed = 1 + phase.observed_ms * shadow.prompts_per_minute / _MINUTE_MS
        units = RolloutPlan.model_validate_json(phase.plan).shadow_units
        return count < allowed and count - left_out < units and tokens < shadow.tokens_max

    async def _add(self, tx: AsyncConnection, phase: ShadowPhase, turn: Turn) -> None:
        number, _, _ = await prompts.prompt_totals(tx, phase.rollout_id)
        members = await unit_store.memberships(tx, turn.session_key, turn.tenant)
        if any(member.rollout_id == phase.rollout_id for member in members):
            return
        tokens = 2 * turn.usage.prompt_tokens
        if await prompts.add_prompt(
            tx, phase.rollout_id, number, turn.session_key, turn.tenant, phase.observed_ms, tokens
        ):
            SHADOW_PROMPTS.labels(turn.model, "taken").inc()
