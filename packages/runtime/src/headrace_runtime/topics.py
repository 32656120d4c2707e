"""Reads the topic files and makes the topics exist. Topics are created explicitly, never by a producer's accident."""

from __future__ import annotations

import asyncio
import time
from functools import cache
from typing import Literal

import yaml
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import KafkaError, TopicAlreadyExistsError, for_code
from pydantic import BaseModel, ConfigDict, Field

from headrace_runtime.bus_client import check_login, client_options
from headrace_runtime.errors import SettingError, Unavailable
from headrace_runtime.logs import get_logger
from headrace_runtime.settings import BusSettings
from headrace_schemas import topics as files

log = get_logger(__name__)


class Topic(BaseModel):
    """One reviewed topic file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    description: str
    producer: str
    consumers: tuple[str, ...]
    key: str
    partitions: int = Field(ge=1)
    retention_ms: int
    cleanup: Literal["delete", "compact"]
    max_message_bytes: int
    dead_letters: str | None
    promises: tuple[str, ...]

    @property
    def config(self) -> dict[str, str]:
        """The settings that Kafka knows about."""
        return {
            "cleanup.policy": self.cleanup,
            "retention.ms": str(self.retention_ms),
            "max.message.bytes": str(self.max_message_bytes),
        }


@cache
def catalogue() -> dict[str, Topic]:
    """Every topic of Headrace, by name."""
    return {name: Topic.model_validate(yaml.safe_load(text)) for name, text in files.sources().items()}


async def ensure(settings: BusSettings, names: tuple[str, ...] | None = None) -> None:
    """Create what is missing (default: the whole catalogue). Waits for the bus, at most `start_timeout_s`. When this
    returns the bus knows all of it: Kafka acknowledges a topic before all of its brokers do.

    An existing topic is left as it is: its partitions and retention may have been changed on purpose. Where it differs
    from its file a warning says so. Raises `SettingError` when sessions would not meet, because topics with their key
    have different numbers of partitions.
    """
    wanted = [topic for name, topic in catalogue().items() if names is None or name in names]
    deadline = time.monotonic() + settings.start_timeout_s
    while True:
        try:
            if not (missing := await _create(settings, wanted)):
                return
            if time.monotonic() > deadline:
                raise Unavailable(f"bus {settings.address} has created {', '.join(missing)} and does not show them")
        except (KafkaError, OSError) as error:
            if time.monotonic() > deadline:
                raise Unavailable(f"bus {settings.address} did not answer: {error}; is it running?") from error
            await check_login(settings)
        await asyncio.sleep(0.2)


async def check(settings: BusSettings, timeout_s: float) -> None:
    """Whether a start could make do with the bus as it is; creates nothing. Raises `SettingError` or `Unavailable`."""
    wanted = list(catalogue().values())
    try:
        async with asyncio.timeout(timeout_s):
            admin = AIOKafkaAdminClient(**client_options(settings), request_timeout_ms=10_000)
            try:
                await admin.start()
                existing = set(await admin.list_topics())
                present = [topic for topic in wanted if topic.name in existing]
                await _check(admin, settings, present, [topic for topic in wanted if topic.name not in existing])
            finally:
                await admin.close()
    except (KafkaError, OSError, ValueError) as error:
        await check_login(settings)
        cause = f"no answer in {timeout_s:g} s" if isinstance(error, TimeoutError) else str(error)
        raise Unavailable(f"setting bus.address = {settings.address!r}: {cause}; is it running there?") from None


async def _create(settings: BusSettings, wanted: list[Topic]) -> list[str]:
    """Returns the names of those that were missing."""
    admin = AIOKafkaAdminClient(**client_options(settings), request_timeout_ms=10_000)
    await admin.start()
    try:
        existing = set(await admin.list_topics())
        missing = [topic for topic in wanted if topic.name not in existing]
        await _check(admin, settings, [topic for topic in wanted if topic.name in existing], missing)
        if not missing:
            return []
        new = [
            NewTopic(topic.name, topic.partitions, settings.replication, topic_configs=topic.config)
            for topic in missing
        ]
        response = await admin.create_topics(new, timeout_ms=10_000)
        for name, code, *_ in response.topic_errors:
            error = for_code(code)
            if code and error is not TopicAlreadyExistsError:
                raise error(f"creating topic {name}")
        return [topic.name for topic in missing]
    finally:
        await admin.close()


async def _check(admin: AIOKafkaAdminClient, settings: BusSettings, present: list[Topic], missing: list[Topic]) -> None:
    if not present:
        return
    described = await admin.describe_topics([topic.name for topic in present])
    counts = {one["topic"]: len(one["partitions"]) for one in described if not one["error_code"]}
    by_session = {t.name: counts.get(t.name, t.partitions) for t in (*present, *missing) if t.key == "session_key"}
    if len(set(by_session.values())) > 1:
        listed = ", ".join(f"{name} {count}" for name, count in sorted(by_session.items()))
        remedy = f"topics keyed by session need equal numbers of partitions there; they have {listed}"
        raise SettingError("bus.address", settings.address, remedy)
    resources = [ConfigResource(ConfigResourceType.TOPIC, one.name, dict.fromkeys(one.config)) for one in present]
    for response in await admin.describe_configs(resources):
        for _code, _message, _kind, name, entries in response.resources:
            found = {entry[0]: entry[1] for entry in entries}
            for setting, value in catalogue()[name].config.items():
                if found.get(setting, value) != value:
                    log.warning("topic_differs", topic=name, setting=setting, bus=found[setting], file=value)
