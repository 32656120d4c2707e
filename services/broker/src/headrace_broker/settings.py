"""Settings of the section `broker`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from headrace_broker.service import INFO
from headrace_runtime.settings.sections import Port, ServiceSettings, is_loopback

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
Bytes = Annotated[int, Field(ge=1024)]


class BrokerSettings(ServiceSettings):
    """Settings of the embedded broker, which is one process with one file under `data_dir/broker/`."""

    port: Port = INFO.port
    """HTTP port for health and metrics. Kafka clients use `kafka_port`."""
    kafka_host: str = "127.0.0.1"
    """Loopback address for Kafka clients."""
    kafka_port: Port = 9092
    """Port for Kafka clients; with 0 the system chooses one."""
    fsync: bool = True
    """Whether records are synced to the disk before they are acknowledged. Without it a crash of the machine may lose
    acknowledged records."""
    file_bytes_max: Annotated[int, Field(ge=0)] = 0
    """Size of the file at which further records are refused; 0 for no limit except the disk."""

    transfer_timeout_s: Seconds = 30.0
    """Time limit in seconds for receiving one request, and for sending one response."""

    maintenance_interval_s: Seconds = 30.0
    """Time between two rounds of retention and compaction."""

    @field_validator("kafka_host")
    @classmethod
    def _loopback(cls, value: str) -> str:
        if not is_loopback(value):
            raise ValueError(
                "the embedded broker listens on loopback only; for several machines run Apache Kafka"
                " and set bus.address"
            )
        return value
