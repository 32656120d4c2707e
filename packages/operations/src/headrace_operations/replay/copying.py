"""Creation, filling, listing and removal of the topics of a replay. Live topics are never changed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from headrace.errors import UsageError
from headrace.producing import Outgoing, Producer
from headrace_operations.replay.pipeline import Item
from headrace_schemas import Checkpoint, Experience, TrainingMetrics
from headrace_schemas.programs import BATCH_HEADER, LEFT_OUT_HEADER, TOPIC_PREFIX, topic_prefix

if TYPE_CHECKING:
    from aiokafka.admin import AIOKafkaAdminClient, NewTopic

_TOPICS = (Experience.topic, Checkpoint.topic, TrainingMetrics.topic)
_RETENTION_MS = 2_592_000_000  # 30 d, as the replayed topics
_BATCH_RECORDS = 200
_TIMEOUT_MS = 30_000


class Copier:
    """Writes experiences in batches to the only partition of a topic. `flush` writes the last batch."""

    def __init__(self, producer: Producer, topic: str) -> None:
        self._producer = producer
        self._topic = topic
        self._batch: list[Outgoing] = []

    async def __call__(self, item: Item) -> None:
        headers = [header for header in item.headers if header[0] not in (BATCH_HEADER, LEFT_OUT_HEADER)]
        batch_headers = [(BATCH_HEADER, str(cut).encode()) for cut in item.cuts]
        batch_headers += [(LEFT_OUT_HEADER, name.encode()) for name in item.left_out]
        self._batch.append(Outgoing(self._topic, item.key, item.value, (*headers, *batch_headers), 0))
        if len(self._batch) >= _BATCH_RECORDS:
            await self.flush()

    async def flush(self) -> None:
        await self._producer.send(self._batch)
        self._batch = []


async def create(bus: str, lineage: str, replication: int = 1) -> None:
    """Create the topics of a replay.

    Raises:
        UsageError: a replay with this lineage exists.
    """
    from aiokafka.errors import for_code

    names = [f"{topic_prefix(lineage)}{topic}" for topic in _TOPICS]
    async with _admin_client(bus) as admin:
        if set(names) & set(await admin.list_topics()):
            raise UsageError(
                f"lineage {lineage!r}: a replay with this name exists; choose another name, resume it with "
                f"`headrace replay resume {lineage}`, or remove it first with `headrace replay remove {lineage}`"
            )
        response = await admin.create_topics(_new_topics(lineage, replication), timeout_ms=_TIMEOUT_MS)
        for name, code, *_ in response.topic_errors:
            if code:
                raise for_code(code)(f"creating topic {name}")


async def ensure(bus: str, lineage: str, replication: int = 1) -> None:
    """Create those topics of a replay that do not exist yet. The caller must know that existing topics belong to it."""
    from aiokafka.errors import TopicAlreadyExistsError, for_code

    async with _admin_client(bus) as admin:
        response = await admin.create_topics(_new_topics(lineage, replication), timeout_ms=_TIMEOUT_MS)
        for name, code, *_ in response.topic_errors:
            if code and for_code(code) is not TopicAlreadyExistsError:
                raise for_code(code)(f"creating topic {name}")


async def remove(bus: str, lineage: str) -> tuple[str, ...]:
    """Delete the remaining topics of a replay and return their names.

    Raises:
        UsageError: the replay has no topics.
    """
    async with _admin_client(bus) as admin:
        existing = set(await admin.list_topics())
        names = tuple(name for topic in _TOPICS if (name := f"{topic_prefix(lineage)}{topic}") in existing)
        if not names:
            raise UsageError(
                f"lineage {lineage!r}: there is no replay with this name; `headrace replay list` lists all replays"
            )
        await admin.delete_topics(list(names), timeout_ms=_TIMEOUT_MS)
        return names


def _new_topics(lineage: str, replication: int) -> list[NewTopic]:
    from aiokafka.admin import NewTopic

    config = {"cleanup.policy": "delete", "retention.ms": str(_RETENTION_MS), "max.message.bytes": "1048576"}
    names = [f"{topic_prefix(lineage)}{topic}" for topic in _TOPICS]
    return [NewTopic(name, 1, replication, topic_configs=config) for name in names]


async def lineages(bus: str) -> tuple[str, ...]:
    """Return the lineages of all replays on this bus."""
    suffix = f"-{Experience.topic}"
    async with _admin_client(bus) as admin:
        names = [name for name in await admin.list_topics() if name.startswith(TOPIC_PREFIX) and name.endswith(suffix)]
        return tuple(sorted(name[len(TOPIC_PREFIX) : -len(suffix)] for name in names))


@asynccontextmanager
async def _admin_client(bus: str) -> AsyncIterator[AIOKafkaAdminClient]:
    from aiokafka.admin import AIOKafkaAdminClient
    from aiokafka.errors import KafkaError

    from headrace.producing import client_options, unreachable

    admin = AIOKafkaAdminClient(**client_options(bus), client_id="headrace-replay")
    try:
        await admin.start()
        yield admin
    except (KafkaError, OSError) as error:
        raise await unreachable(bus, error) from error
    finally:
        await admin.close()
