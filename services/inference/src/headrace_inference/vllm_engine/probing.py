"""Checks of a version in an engine core: the folder of its adapter, its logprobs, and the separation of probes from
other requests.

Each token of the fingerprint is a separate request, which takes the same path as sampled tokens. vLLM can return the
logprobs of a prompt in one request, but they take another path, and on a CPU they kill a core with adapters.

If one request of a step has `logprob_token_ids`, vLLM (0.32) returns only the sampled token's logprob for all other
requests of the step, so requests with `top_logprobs` would get no top logprobs. So a probe waits until no such request
is running, and such requests wait while a probe runs, which takes about a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

from headrace_inference.errors import VersionUnusable
from headrace_schemas import Probe
from headrace_schemas.values.blobs import Fingerprint
from headrace_schemas.values.text import read_user_text

LogprobFunction = Callable[[Sequence[int], int], Awaitable[float]]
"""Function that returns the logprob at temperature 1 of a token after a prompt."""
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "use_dora": (False,),
    "bias": ("none",),
    "modules_to_save": ((),),
    "trainable_token_indices": ((),),
    "lora_bias": (False,),
    "layer_replication": ((),),
    "target_parameters": ((),),
}
"""Fields of a LoRA configuration that vLLM does not support, with their values when they are not used."""


async def probe(
    fingerprint: Fingerprint,
    version: LogprobFunction,
    parent: LogprobFunction | None,
    concurrency: int,
    tolerance: float,
) -> Probe:
    """Compare the engine's logprobs of a version with the fingerprint and with its logprobs of the parent version.

    Args:
        fingerprint: tokens with the logprobs that the trainer computed.
        version: function that computes logprobs of the version.
        parent: function that computes logprobs of the parent; None if it is not loaded.
        concurrency: largest number of requests at a time.
        tolerance: largest accepted difference from the fingerprint, in nats.
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


def check_adapter(folder: Path, rank_max: int) -> None:
    """Check the folder of an adapter before vLLM loads it.

    Raises:
        VersionUnusable: it is no LoRA adapter, has a rank above `rank_max`, or is not supported.
    """
    try:
        config = json.loads(read_user_text(folder / CONFIG))
        kind, rank = config["peft_type"], max([config["r"], *(config.get("rank_pattern") or {}).values()])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise VersionUnusable(f"{CONFIG} cannot be read: {type(error).__name__}: {error}") from None
    if kind != "LORA":
        raise VersionUnusable(f"adapters of type {kind} are not supported; LoRA is")
    if not (folder / WEIGHTS).exists():
        raise VersionUnusable(f"the adapter has no {WEIGHTS}")
    if rank > rank_max:
        raise VersionUnusable(f"the adapter has rank {rank}, inference.vllm.adapter_rank_max allows {rank_max}")
    for name, neutral in _NEUTRAL.items():
        value = config.get(name)
        if value and value not in neutral:
            raise VersionUnusable(f"{CONFIG} sets {name} = {json.dumps(value)[:100]}, which vLLM does not support")


class StepSeparation:
    """Lock of one engine core that keeps probes and requests with `top_logprobs` out of the same step.

    Used in the event loop.
    """

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._ranked = 0
        self._probes = 0
        self._probes_waiting = 0

    @contextlib.asynccontextmanager
    async def enter_request(self, top_logprobs: bool) -> AsyncIterator[None]:
        """Open a context for a request. With `top_logprobs` it first waits until no probe runs or waits."""
        if not top_logprobs:
            yield
            return
        async with self._changed:
            await self._changed.wait_for(lambda: not self._probes and not self._probes_waiting)
            self._ranked += 1
        try:
            yield
        finally:
            self._ranked -= 1
            await self._notify()

    @contextlib.asynccontextmanager
    async def enter_probe(self) -> AsyncIterator[None]:
        """Open a context for a probe. It first waits until no request with `top_logprobs` runs."""
        self._probes_waiting += 1
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: not self._ranked)
                self._probes += 1
        finally:
            self._probes_waiting -= 1
        try:
            yield
        finally:
            self._probes -= 1
            await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
