"""Compares what a loaded version answers with its fingerprint and with its parent's answer.

Each token of the fingerprint is asked for by a request of its own, through the path that samples. The logprobs of a
prompt would come in one request, but not from what serves: and on a CPU, asking a core with adapters for them kills it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from headrace_schemas import Probe
from headrace_schemas.manifest import Fingerprint

Ask = Callable[[Sequence[int], int], Awaitable[float]]
"""The logprob at temperature 1 of a token after a prompt."""


async def probe(fingerprint: Fingerprint, ours: Ask, parents: Ask | None, together: int, tolerance: float) -> Probe:
    """`parents` is the loaded parent, where there is one. At most `together` requests at a time."""
    tokens = list(fingerprint.token_ids)
    answered = await answers(tokens, ours, together)
    delta = _difference(answered, fingerprint.logprobs)
    parent_delta = None
    if parents is not None:
        parent_delta = _difference(answered, await answers(tokens, parents, together))
    passed = delta <= tolerance and (parent_delta is None or parent_delta > 0)
    return Probe(max_abs_delta=delta, parent_max_abs_delta=parent_delta, passed=passed)


async def answers(tokens: Sequence[int], ask: Ask, together: int) -> list[float]:
    """Logprobs of each of `tokens[1:]`."""
    places = asyncio.Semaphore(together)

    async def one(place: int) -> float:
        async with places:
            return await ask(tokens[:place], tokens[place])

    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(one(place)) for place in range(1, len(tokens))]
    return [task.result() for task in asked]


def _difference(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest; infinite where a logprob is no number."""
    difference = max(abs(a - b) for a, b in zip(one, other, strict=True))
    return difference if all(a == a for a in one) else float("inf")
