"""Creates, fills, finds and removes the topics of a replay. It never touches live topics."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from headrace.errors import UsageError
from headrace.producing import Outgoing, Producer
from headrace_operations.replay.pipeline import Item
from headrace_schemas import Checkpoint, Experience, TrainingMetrics
from headrace_schemas.replay import BATCH_HEADER, LEFT_OUT_HEADER, TOPIC_PREFIX, topic_prefix

if TYPE_CHECKING:
    from aiokafka.admin import AIOKafkaAdminClient, NewTopic

_TOPICS = (Experience.topic, Checkpoint.topic, TrainingMetrics.topic)
_RETENTION_MS = 2_592_000_000  # 30 d, as that of what is replayed
_SEND_AT_ONCE = 200
_TIMEOUT_MS = 30_000


class Copier:
    """Writes items to the one partition of a topic; the last ones only with `flush`."""

    def __init__(self, producer: Producer, topic: str) -> None:
        self._producer = producer
        self._topic = topic
        self._waiting: list[Outgoing] = []

    async def __call__(self, item: Item) -> None:
        own = [header for header in item.headers if header[0] not in (BATCH_HEADER, LEFT_OUT_HEADER)]
        marks = [(BATCH_HEADER, str(cut).encode()) for cut in item.cuts]
        marks += [(LEFT_OUT_HEADER, name.encode()) for name in item.left_out]
        self._waiting.append(Outgoing(self._topic, item.key, item.value, (*own, *marks), 0))
        if len(self._waiting) >= _SEND_AT_ONCE:
            await self.flush()

    async def flush(self) -> None:
        await self._producer.send(self._waiting)
        self._waiting = []


async def create(bus: str, lineage: str, replication: int = 1) -> None:
    """Raises `UsageError` when there is a replay of this name."""
    from aiokafka.errors import for_code

    names = [f"{topic_prefix(lineage)}{topic}" for topic in _TOPICS]
    async with _administering(bus) as admin:
        if set(names) & set(await admin.list_topics()):
            raise UsageError(
                f"there is a replay into lineage {lineage!r} already; choose another name, go on with "
                f"`headrace replay resume {lineage}`, or `headrace replay remove {lineage}` first"
            )
        response = await admin.create_topics(_new(lineage, replication), timeout_ms=_TIMEOUT_MS)
        for name, code, *_ in response.topic_errors:
            if code:
                raise for_code(code)(f"creating topic {name}")


async def ensure(bus: str, lineage: str, replication: int = 1) -> None:
    """Like `create`, for whoever knows that what is there is its own."""
    from aiokafka.errors import TopicAlreadyExistsError, for_code

    async with _administering(bus) as admin:
        response = await admin.create_topics(_new(lineage, replication), timeout_ms=_TIMEOUT_MS)
        for name, code, *_ in response.topic_errors:
            if code and for_code(code) is not TopicAlreadyExistsError:
                raise for_code(code)(f"creating topic {name}")


async def remove(bus: str, lineage: str) -> tuple[str, ...]:
    """Delete what is left of a replay's topics. Raises `UsageError` when there is none."""
    async with _administering(bus) as admin:
        there = set(await admin.list_topics())
        names = tuple(name for topic in _TOPICS if (name := f"{topic_prefix(lineage)}{topic}") in there)
        if not names:
            raise UsageError(
                f"there is no replay into lineage {lineage!r} on this bus; `headrace replay list` shows all"
            )
        await admin.delete_topics(list(names), timeout_ms=_TIMEOUT_MS)
        return names


def _new(lineage: str, replication: int) -> list[NewTopic]:
    from aiokafka.admin import NewTopic

    config = {"cleanup.policy": "delete", "retention.ms": str(_RETENTION_MS), "max.message.bytes": "1048576"}
    names = [f"{topic_prefix(lineage)}{topic}" for topic in _TOPICS]
    return [NewTopic(name, 1, replication, topic_configs=config) for name in names]


async def lineages(bus: str) -> tuple[str, ...]:
    """Every lineage that a replay on this bus leads into."""
    after = f"-{Experience.topic}"
    async with _administering(bus) as admin:
        names = [name for name in await admin.list_topics() if name.startswith(TOPIC_PREFIX) and name.endswith(after)]
        return tuple(sorted(name[len(TOPIC_PREFIX) : -len(after)] for name in names))


@asynccontextmanager
async def _administering(bus: str) -> AsyncIterator[AIOKafkaAdminClient]:
    from aiokafka.admin import AIOKafkaAdminClient
    from aiokafka.errors import KafkaError

    from headrace.bus_access import client_options, unreachable

    admin = AIOKafkaAdminClient(**client_options(bus), client_id="headrace-replay")
    try:
        await admin.start()
        yield admin
    except (KafkaError, OSError) as error:
        raise await unreachable(bus, error) from error
    finally:
        await admin.close()
