"""Options of Kafka clients (address, login, encryption), and creation of the topics.

The topics are defined in `headrace_schemas/topics.yaml`. No topic is created implicitly by a producer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import yaml
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.conn import create_conn
from aiokafka.errors import (
    AuthenticationFailedError,
    IllegalSaslStateError,
    KafkaError,
    SaslAuthenticationFailed,
    TopicAlreadyExistsError,
    UnsupportedSaslMechanismError,
    for_code,
)
from aiokafka.helpers import create_ssl_context
from pydantic import BaseModel, ConfigDict, Field

from headrace_runtime.errors import SettingError, Unavailable
from headrace_runtime.process.logs import get_logger
from headrace_runtime.settings.sections import BusSettings

_CHECK_MS = 10_000
LOGIN_ERRORS = (
    AuthenticationFailedError, SaslAuthenticationFailed, UnsupportedSaslMechanismError, IllegalSaslStateError,
)  # fmt: skip


def client_options(settings: BusSettings) -> dict[str, Any]:
    """Return the connection options for an aiokafka client. Raises `OSError` if the certificate file cannot be read."""
    options: dict[str, Any] = {"bootstrap_servers": settings.address}
    if settings.tls:
        options["ssl_context"] = create_ssl_context(cafile=settings.ca_file or None)
    if password := settings.password.get_secret_value():
        options |= {
            "security_protocol": "SASL_SSL" if settings.tls else "SASL_PLAINTEXT",
            "sasl_mechanism": settings.mechanism,
            "sasl_plain_username": settings.username,
            "sasl_plain_password": password,
        }
        logging.getLogger("aiokafka.conn").addFilter(_is_unexpected)
    elif settings.tls:
        options["security_protocol"] = "SSL"
    return options


async def check_login(settings: BusSettings) -> None:
    """Try to log in at the first address of the bus. Return normally if the bus does not respond.

    Raises:
        SettingError: the bus refuses the login.
    """
    host, _, port = settings.address.split(",")[0].strip().rpartition(":")
    options = client_options(settings)
    del options["bootstrap_servers"]
    if not port.isdecimal() or not options:
        return
    try:
        connection = await create_conn(host.strip("[]"), int(port), request_timeout_ms=_CHECK_MS, **options)
        connection.close()
    except LOGIN_ERRORS as error:
        remedy = f"the bus {settings.address} refuses it for user {settings.username!r} ({type(error).__name__})"
        raise SettingError("bus.password", settings.password.get_secret_value(), remedy) from None
    except (KafkaError, OSError):
        return


def _is_unexpected(record: logging.LogRecord) -> bool:
    """Return False for aiokafka's warning about a login without TLS, because the settings have chosen that."""
    return "in the clear" not in str(record.msg)


log = get_logger(__name__)


class Topic(BaseModel):
    """Definition of one topic in `headrace_schemas/topics.yaml`."""

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
        """Configuration of the topic, as Kafka's API expects it."""
        return {
            "cleanup.policy": self.cleanup,
            "retention.ms": str(self.retention_ms),
            "max.message.bytes": str(self.max_message_bytes),
        }


@cache
def catalogue() -> dict[str, Topic]:
    """Return all topics of Headrace by name."""
    specs = yaml.safe_load((files("headrace_schemas") / "topics.yaml").read_text(encoding="utf-8"))
    return {name: Topic.model_validate({"name": name, **spec}) for name, spec in specs.items()}


async def ensure(settings: BusSettings, names: tuple[str, ...] | None = None) -> None:
    """Create the topics among `names` that do not exist, and wait until the bus lists them.

    Existing topics stay unchanged, because an operator may have changed their partitions or retention. A difference
    from `topics.yaml` is logged as a warning.

    Args:
        settings: the settings of the bus. This waits at most `start_timeout_s` for the bus.
        names: the names of the topics, or None for all topics.

    Raises:
        SettingError: topics that are keyed by session have different numbers of partitions, or the login is refused.
        Unavailable: the bus does not respond in time.
    """
    required = [topic for name, topic in catalogue().items() if names is None or name in names]
    deadline = time.monotonic() + settings.start_timeout_s
    while True:
        try:
            if not (missing := await _create_missing(settings, required)):
                return
            if time.monotonic() > deadline:
                raise Unavailable(f"bus {settings.address} has created {', '.join(missing)} but does not list them")
        except (KafkaError, OSError) as error:
            if time.monotonic() > deadline:
                raise Unavailable(f"bus {settings.address} did not respond: {error}; is it running?") from error
            await check_login(settings)
        await asyncio.sleep(0.2)


async def check(settings: BusSettings, timeout_s: float) -> None:
    """Check that the existing topics are suitable for a start of the services. No topic is created.

    Raises:
        SettingError: topics that are keyed by session have different numbers of partitions, or the login is refused.
        Unavailable: the bus does not respond in time.
    """
    required = list(catalogue().values())
    try:
        async with asyncio.timeout(timeout_s):
            admin = AIOKafkaAdminClient(**client_options(settings), request_timeout_ms=10_000)
            try:
                await admin.start()
                existing = set(await admin.list_topics())
                present = [topic for topic in required if topic.name in existing]
                missing = [topic for topic in required if topic.name not in existing]
                await _check(admin, settings, present, missing)
            finally:
                await admin.close()
    except (KafkaError, OSError, ValueError) as error:
        await check_login(settings)
        cause = f"no response in {timeout_s:g} s" if isinstance(error, TimeoutError) else str(error)
        raise Unavailable(f"setting bus.address = {settings.address!r}: {cause}; is it running there?") from None


async def _create_missing(settings: BusSettings, required: list[Topic]) -> list[str]:
    """Create the topics of `required` that do not exist, and return their names."""
    admin = AIOKafkaAdminClient(**client_options(settings), request_timeout_ms=10_000)
    await admin.start()
    try:
        existing = set(await admin.list_topics())
        missing = [topic for topic in required if topic.name not in existing]
        await _check(admin, settings, [topic for topic in required if topic.name in existing], missing)
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
    """Check that topics keyed by session have equal numbers of partitions, else raise `SettingError`. Log other
    differences from `topics.yaml`."""
    if not present:
        return
    descriptions = await admin.describe_topics([topic.name for topic in present])
    counts = {
        description["topic"]: len(description["partitions"])
        for description in descriptions
        if not description["error_code"]
    }
    by_session = {t.name: counts.get(t.name, t.partitions) for t in (*present, *missing) if t.key == "session_key"}
    if len(set(by_session.values())) > 1:
        numbers = ", ".join(f"{name} {count}" for name, count in sorted(by_session.items()))
        remedy = f"topics keyed by session need equal numbers of partitions; they have {numbers}"
        raise SettingError("bus.address", settings.address, remedy)
    resources = [ConfigResource(ConfigResourceType.TOPIC, topic.name, dict.fromkeys(topic.config)) for topic in present]
    for response in await admin.describe_configs(resources):
        for _code, _message, _kind, name, entries in response.resources:
            config = {entry[0]: entry[1] for entry in entries}
            for setting, value in catalogue()[name].config.items():
                if config.get(setting, value) != value:
                    log.warning("topic_differs", topic=name, setting=setting, bus=config[setting], file=value)
