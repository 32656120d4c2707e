"""Comparison of a loaded version's logprobs with its fingerprint and with its parent's logprobs.

Each token of the fingerprint is a separate request, which takes the same path as sampled tokens. vLLM can return the
logprobs of a prompt in one request, but they take another path, and on a CPU they kill a core with adapters.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from headrace_schemas import Probe
from headrace_schemas.values.blobs import Fingerprint

LogprobFunction = Callable[[Sequence[int], int], Awaitable[float]]
"""Function that returns the logprob at temperature 1 of a token after a prompt."""


async def probe(
    fingerprint: Fingerprint,
    version: LogprobFunction,
    parent: LogprobFunction | None,
    concurrency: int,
    tolerance: float,
) -> Probe:
    """Compare a version with its fingerprint, and with its parent if that is loaded.

    Args:
        version: computes logprobs of the version.
        parent: computes logprobs of the parent.
        concurrency: largest number of requests at a time.
        tolerance: largest accepted difference from the fingerprint.
    """
    tokens = list(fingerprint.token_ids)
    logprobs = await compute_logprobs(tokens, version, concurrency)
    delta = _difference(logprobs, fingerprint.logprobs)
    parent_delta = None
    if parent is not None:
        parent_delta = _difference(logprobs, await compute_logprobs(tokens, parent, concurrency))
    passed = delta <= tolerance and (parent_delta is None or parent_delta > 0)
    return Probe(max_abs_delta=delta, parent_max_abs_delta=parent_delta, passed=passed)


async def compute_logprobs(tokens: Sequence[int], logprob: LogprobFunction, concurrency: int) -> list[float]:
    """Return the logprobs of `tokens[1:]`, each after the tokens before it."""
    slots = asyncio.Semaphore(concurrency)

    async def compute(position: int) -> float:
        async with slots:
            return await logprob(tokens[:position], tokens[position])

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(compute(position)) for position in range(1, len(tokens))]
    return [task.result() for task in tasks]


def _difference(logprobs: Sequence[float], reference: Sequence[float]) -> float:
    """Return the largest absolute difference; infinity if a logprob is NaN."""
    difference = max(abs(a - b) for a, b in zip(logprobs, reference, strict=True))
    return difference if all(a == a for a in logprobs) else float("inf")
