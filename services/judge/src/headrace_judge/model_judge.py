"""Judge that calls the model, with a cache of verdicts, a budget, and one repair call after an unreadable answer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from weakref import WeakValueDictionary

from headrace_judge import scoring, tables
from headrace_judge.call_budget import BudgetLimit, CallBudget, Reservation, TenantCircuitBreakers
from headrace_judge.endpoint import CallRefused, CallTimedOut, Completion, Endpoint, EndpointUnavailable
from headrace_judge.metrics import ASKED_AGAIN, CACHE_HITS
from headrace_judge.rubric import Rubric
from headrace_judge.run_transcript import ChatMessage, Prompts, RunTranscript
from headrace_judge.scoring import Judgement, Reading
from headrace_judge.settings import JudgeSettings
from headrace_judge.tables import transact
from headrace_judge.verdict import Reader, Unreadable, Verdict, reader
from headrace_runtime.errors import HeadraceError
from headrace_runtime.stream.processor import Processor

_BYTES_PER_TOKEN = 4
_QUOTED_CHARS_MAX = 8_000


class BudgetSpent(HeadraceError):
    """Error of a call that would exceed a limit of the budget. The message names the limit."""


class ModelJudge:
    """Judge that requests verdicts from the model.

    Methods raise `BudgetSpent`, `EndpointUnavailable`, `CallTimedOut` or `CallRefused`.

    Each readable answer is stored before the next call, so that a retry does not pay for it again.
    """

    def __init__(
        self,
        settings: JudgeSettings,
        prompts: Prompts,
        budget: CallBudget,
        processor: Processor,
        endpoint: Endpoint,
        breakers: TenantCircuitBreakers,
    ) -> None:
        self._settings = settings
        self._prompts = prompts
        self._budget = budget
        self._processor = processor
        self._endpoint = endpoint
        self._breakers = breakers
        self._question_locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def judge_run(self, rubric: Rubric, run: RunTranscript, tenant: str) -> Judgement:
        """Judge one run by a rubric, with `judge.samples` verdicts."""
        return scoring.judge_run(rubric, await self._readings(rubric, self._prompts.run_messages(rubric, run), tenant))

    async def judge_pair(self, rubric: Rubric, first: RunTranscript, second: RunTranscript, tenant: str) -> Judgement:
        """Compare two runs in both orders, and return the judgement of the first run.

        Equal transcripts need no call.
        """
        if first.entries == second.entries:
            return scoring.judge_equal_runs(rubric)
        first_as_a = await self._readings(rubric, self._prompts.pair_messages(rubric, first, second), tenant)
        first_as_b = await self._readings(rubric, self._prompts.pair_messages(rubric, second, first), tenant)
        return scoring.judge_pair(rubric, first_as_a, first_as_b)

    async def _readings(self, rubric: Rubric, messages: list[ChatMessage], tenant: str) -> list[Reading]:
        read = reader(rubric)
        return [
            await self._cached_or_requested(messages, read, sample, tenant) for sample in range(self._settings.samples)
        ]

    async def _cached_or_requested(
        self, messages: list[ChatMessage], read: Reader, sample: int, tenant: str
    ) -> Reading:
        """Return the cached verdict on a question or else request it, and cache it if it is readable."""
        question = tables.question_digest(self._endpoint.body(messages), sample)
        lock = self._question_locks.setdefault(question, asyncio.Lock())
        async with lock:  # equal runs often arrive together, and the second one finds the verdict in the cache
            cached = await transact(self._processor, lambda tx, _now: tables.find_verdict(tx, question))
            if cached is not None:
                CACHE_HITS.inc()
                return cached
            reading = await self._request_verdict(messages, read, tenant)
            if isinstance(reading, Verdict):
                verdict = reading
                await transact(self._processor, lambda tx, now: tables.store_verdict(tx, now, question, verdict))
            return reading

    async def _request_verdict(self, messages: list[ChatMessage], read: Reader, tenant: str) -> Reading:
        """Call the model, and once more with the parser's error if its answer is unreadable and the budget
        allows it.
        """
        completion = await self._call(messages, tenant)
        reading = _read(completion, read)
        if isinstance(reading, Verdict):
            return reading
        ASKED_AGAIN.inc()
        quoted: ChatMessage = {"role": "assistant", "content": completion.text[:_QUOTED_CHARS_MAX] or "(nothing)"}
        try:
            return _read(
                await self._call([*messages, quoted, self._prompts.repair_request(str(reading))], tenant), read
            )
        except BudgetSpent:
            return reading

    async def _call(self, messages: list[ChatMessage], tenant: str) -> Completion:
        """Call the model, and again if the call times out, as often as the settings allow."""
        body = self._endpoint.body(messages)
        for _ in range(self._settings.retry.timeouts_max - 1):
            try:
                return await self._call_once(messages, body, tenant)
            except CallTimedOut:
                continue
        return await self._call_once(messages, body, tenant)

    async def _call_once(self, messages: list[ChatMessage], body: Mapping[str, object], tenant: str) -> Completion:
        """Call the model once, within the budget, and report the result to the tenant's breaker."""
        reservation = await self._reserve(body, tenant)
        try:
            completion = await self._endpoint.complete(messages)
        except EndpointUnavailable as error:
            self._breakers.of(tenant).record_failure(error.wait_s)
            await self._correct(reservation, None if error.billed else 0)
            raise
        except CallRefused:
            await self._correct(reservation, 0)
            raise
        self._breakers.of(tenant).record_success()
        await self._correct(reservation, completion.tokens)
        return completion

    async def _reserve(self, body: Mapping[str, object], tenant: str) -> Reservation:
        tokens = len(str(body).encode()) // _BYTES_PER_TOKEN + self._settings.endpoint.max_tokens
        answer = await transact(self._processor, lambda tx, now: self._budget.reserve(tx, now, tokens, tenant))
        if isinstance(answer, BudgetLimit):
            raise BudgetSpent(str(answer))
        return answer

    async def _correct(self, reservation: Reservation, tokens: int | None) -> None:
        await transact(self._processor, lambda tx, _now: self._budget.correct(tx, reservation, tokens))


def _read(completion: Completion, read: Reader) -> Reading:
    if completion.refused:
        return Verdict(criteria=None, reason="the model or its provider refused")
    try:
        return read(completion.text)
    except Unreadable as error:
        return error
