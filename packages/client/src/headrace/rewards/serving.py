"""Process that computes rewards with a function of your own and publishes them on the bus. Needs the extra
`headrace-client[topics]`.

    from headrace.rewards import serve

    def short(trajectory):
        return 1.0 if len(trajectory.final_answer) < 200 else 0.0

    serve(short, source="short", bus="127.0.0.1:9092")

Any number of these processes may run, in any language; see docs/producing.md. To run functions in the scorer itself,
list them in `scorer.functions` instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import math
import signal
import threading
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from headrace.errors import HeadraceError, UsageError
from headrace.producing import Outgoing, Producer, client_options, producing, unreachable
from headrace.topics import event_of
from headrace_schemas import Reward, RewardResult, Trajectory
from headrace_schemas.events.feedback import Outcome
from headrace_schemas.values.base import utcnow
from headrace_schemas.values.errors import InvalidEvent
from headrace_schemas.values.text import describe_error, plain_number, printable

if TYPE_CHECKING:
    from aiokafka import AIOKafkaConsumer, ConsumerRecord

Verdict = float | Mapping[str, float] | RewardResult | None
"""Result of a reward function: a number, None to abstain, or a dictionary of criteria. The score of a dictionary is its
`value`, or else its mean."""
Function = Callable[[Trajectory], Verdict | Awaitable[Verdict]]
log = logging.getLogger(__name__)
_BATCH_MAX = 50
_POLL_MS = 500
_REASON_LENGTH_MAX = 1000


def serve(function: Function, *, source: str, bus: str, timeout_s: float = 60.0) -> None:
    """Compute and publish a reward of each new trajectory with `function`, until SIGINT or SIGTERM.

    Processes with the same `source` share the work and continue from the committed offsets. After a crash calls are
    repeated, and each verdict counts once. An exception results in the outcome `failed`, and a call longer than
    `timeout_s` in `timed_out`; neither is a score.

    Raises:
        HeadraceError: a function that is not async timed out. It cannot be cancelled, so the process must be restarted.
        Unreachable: the bus stopped answering.
    """

    async def until_stopped() -> None:
        task = asyncio.ensure_future(consume(function, source=source, bus=bus, timeout_s=timeout_s))
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(until_stopped())


async def consume(function: Function, *, source: str, bus: str, timeout_s: float = 60.0) -> None:
    """Compute and publish a reward of each new trajectory with `function`, until cancelled. The arguments are those of
    `serve`."""
    try:
        from aiokafka import AIOKafkaConsumer
        from aiokafka.errors import KafkaError
    except ImportError:
        raise UsageError("reading topics needs the extra: pip install 'headrace-client[topics]'") from None
    reader = AIOKafkaConsumer(
        Trajectory.topic,
        **client_options(bus),
        group_id=f"rewards-{source}",
        enable_auto_commit=False,
        auto_offset_reset="earliest",
    )
    async with producing(bus, f"rewards-{source}") as producer:
        try:
            await reader.start()
            while True:
                await _reward_batch(reader, producer, function, source, timeout_s)
        except (KafkaError, OSError) as error:
            raise await unreachable(bus, error) from error
        finally:
            await reader.stop()


async def _reward_batch(
    reader: AIOKafkaConsumer, producer: Producer, function: Function, source: str, timeout_s: float
) -> None:
    """Read a batch of trajectories, compute their rewards, and publish them.

    The rewards are durable before the offsets of the trajectories are committed.
    """
    batches = await reader.getmany(timeout_ms=_POLL_MS, max_records=_BATCH_MAX)
    reached = {}
    stuck = None
    for partition, record in ((partition, record) for partition, records in batches.items() for record in records):
        trajectory = await _trajectory(record)
        if trajectory is not None:
            rewards = await verdicts(function, trajectory, source, timeout_s)
            await producer.send([Outgoing.of(reward, f"rewards/{source}") for reward in rewards])
            if rewards[0].outcome == "timed_out" and not inspect.iscoroutinefunction(function):
                stuck = trajectory.trajectory_id
        reached[partition] = record.offset + 1
        if stuck is not None:
            break
    if reached:
        await reader.commit(reached)
    if stuck is not None:
        raise HeadraceError(f"{source}: {stuck} took longer than {timeout_s:g} s and cannot be stopped; start again")


async def _trajectory(record: ConsumerRecord) -> Trajectory | None:
    """Return the trajectory in a record, or None if the record contains no valid one. Such records are ignored, because
    the scorer reads the same topic and dead-letters them. A record whose blob cannot be read is logged and ignored.
    """
    try:
        event = await event_of(record.topic, record.value, record.headers)
    except InvalidEvent:
        return None
    except (HeadraceError, FileNotFoundError, NotADirectoryError, PermissionError) as error:
        position = f"{record.topic}[{record.partition}] at {record.offset}"
        log.warning("%s: left out, because its trajectory cannot be read: %s", position, printable(str(error)))
        return None
    return event if isinstance(event, Trajectory) else None


async def verdict(function: Function, trajectory: Trajectory, source: str, timeout_s: float) -> Reward:
    """Call a reward function, and return the reward of the trajectory. If the function fails, the reward has the
    outcome `failed` or `timed_out` and no score."""
    return (await verdicts(function, trajectory, source, timeout_s))[0]


async def verdicts(function: Function, trajectory: Trajectory, source: str, timeout_s: float) -> list[Reward]:
    """Call a reward function. Return the reward of the trajectory, followed by those of its turns if the function
    returned any.

    Args:
        function: the reward function.
        trajectory: the trajectory.
        source: source of the rewards.
        timeout_s: seconds after which the call is abandoned, with the outcome `timed_out`.
    """
    outcome: Outcome
    result, limit = RewardResult(), asyncio.timeout(timeout_s)
    try:
        async with limit:
            call = function if inspect.iscoroutinefunction(function) else partial(_in_thread, function)
            result = _result(await call(trajectory))
        outcome = "scored" if result.value is not None else "abstained"
    except Exception as error:  # noqa: BLE001 (a user's function may raise anything)
        outcome = "timed_out" if limit.expired() else "failed"
        result = RewardResult(reason=describe_error(error)[:_REASON_LENGTH_MAX] if outcome == "failed" else None)
    trajectory_reward = Reward(
        time=utcnow(),
        trajectory_id=trajectory.trajectory_id,
        session_key=trajectory.session_key,
        tenant=trajectory.tenant,
        source=source,
        outcome=outcome,
        value=result.value,
        criteria=result.criteria,
        reason=result.reason,
    )
    known_turns = {turn_id for branch in trajectory.branches for turn_id in branch.turn_ids}
    turn_fields: dict[str, Any] = {"outcome": "scored", "criteria": {}, "reason": None}
    return [trajectory_reward] + [
        trajectory_reward.model_copy(update={**turn_fields, "turn_id": turn_id, "value": value})
        for turn_id, value in result.turns.items()
        if turn_id in known_turns
    ]


async def _in_thread(function: Function, trajectory: Trajectory) -> Any:
    """Call the function in a daemon thread. So the event loop keeps the membership in the consumer group, and a call
    that never ends does not prevent the exit."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[Any] = loop.create_future()

    def settle(returned: Any, error: BaseException | None) -> None:
        if result.done():
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(returned)

    def work() -> None:
        returned, problem = None, None
        try:
            returned = function(trajectory)
        except Exception as error:  # noqa: BLE001 (raised again where it is awaited)
            problem = error
        with contextlib.suppress(RuntimeError):  # the loop is closed, so the result is not needed any more
            loop.call_soon_threadsafe(settle, returned, problem)

    threading.Thread(target=work, daemon=True).start()
    return await result


def _result(returned: object) -> RewardResult:
    if isinstance(returned, RewardResult):
        result = returned
    elif returned is None or (isinstance(returned, Mapping) and returned.get("value", 0.0) is None):
        return RewardResult()
    elif isinstance(returned, Mapping):
        criteria = {str(name): _number(value) for name, value in returned.items()}
        result = RewardResult(value=criteria.pop("value", None), criteria=criteria)
    else:
        result = RewardResult(value=_number(returned))
    if result.value is None and result.criteria:
        mean = math.fsum(result.criteria.values()) / len(result.criteria)
        result = result.model_copy(update={"value": mean})
    return result


def _number(value: object) -> float:
    try:
        return plain_number(value)
    except TypeError as error:
        raise TypeError(f"returned: {error}; or None, a dict of numbers, a RewardResult") from None
