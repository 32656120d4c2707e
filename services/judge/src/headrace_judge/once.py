"""A single judgement for a program that waits for its result, with the service's prompts and endpoint but no queue.

There is no cache, no budget and no retry. The caller pays for each call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from headrace_judge.endpoint import Endpoint
from headrace_judge.rubric import Criterion, Rubric
from headrace_judge.run_transcript import Prompts, RunTranscript, TranscriptEntry
from headrace_judge.settings import EndpointSettings
from headrace_judge.verdict import Unreadable, Verdict, reader
from headrace_runtime.errors import HeadraceError

_INSTRUCTIONS = "Judge the answer by each criterion alone. Abstain only where nothing is there that could be judged."


class NoVerdict(HeadraceError):
    """Error of a judgement without scores: the judge abstained, refused, or answered in an invalid form."""


def scores(
    endpoint: Mapping[str, Any], key: str, criteria: Mapping[str, str], question: str, answer: str
) -> dict[str, float]:
    """Judge one answer, and return the score of each criterion, from 1 to 5.

    An unreadable answer is requested once more.

    Args:
        endpoint: settings of the section `[judge.endpoint]`.
        key: bearer token.
        criteria: description of each criterion.

    Raises:
        NoVerdict: the judge gave no scores.
        EndpointUnavailable, CallTimedOut, CallRefused: the call failed.
    """
    rubric = Rubric(
        name="once",
        instructions=_INSTRUCTIONS,
        criteria=tuple(Criterion(name=name, description=text) for name, text in criteria.items()),
    )
    settings = EndpointSettings.model_validate(dict(endpoint))
    entries = TranscriptEntry(kind="question", text=question), TranscriptEntry(kind="answer", text=answer)
    work = _scores(settings, key, rubric, RunTranscript(entries=entries))
    with ThreadPoolExecutor(1, thread_name_prefix="judge-once") as thread:  # the caller may have an event loop
        return thread.submit(asyncio.run, work).result()


async def _scores(settings: EndpointSettings, key: str, rubric: Rubric, run: RunTranscript) -> dict[str, float]:
    prompts, read = Prompts(), reader(rubric)
    messages = prompts.run_messages(rubric, run)
    endpoint = Endpoint(settings, key)
    try:
        verdict: Verdict | None = None
        for again in (True, False):
            completion = await endpoint.complete(messages)
            if completion.refused:
                raise NoVerdict(f"{settings.model} refused to judge")
            try:
                verdict = read(completion.text)
                break
            except Unreadable as error:
                if not again:
                    raise NoVerdict(f"the answer of {settings.model} is no verdict: {error}") from None
                quoted = completion.text or "(nothing)"
                messages = [*messages, {"role": "assistant", "content": quoted}, prompts.repair_request(str(error))]
    finally:
        await endpoint.close()
    if verdict is None or verdict.criteria is None:
        raise NoVerdict(f"{settings.model} abstained: {verdict.reason if verdict else 'no reason given'}")
    return {name: float(score) for name, score in verdict.criteria.items()}
