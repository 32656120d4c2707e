"""Settings of the broker: the section `[broker]`."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from headrace_broker import INFO
from headrace_runtime.settings.sections import Port, ServiceSettings
from headrace_runtime.settings.table import Fixed

KAFKA_HOST = "127.0.0.1"
"""Address for Kafka clients. The broker has no TLS and one copy of each record, so it serves this machine alone."""


class BrokerSettings(ServiceSettings):
    """Settings of the embedded broker, which is one process with one file under `data_dir/broker/`."""

    FIXED: ClassVar = {
        "kafka_host": Fixed(KAFKA_HOST, "for several machines run Apache Kafka and set bus.address"),
        "transfer_timeout_s": Fixed(30.0),
    }
    PARAMETERS: ClassVar = ("file_bytes_max",)

    port: Port = INFO.port
    """HTTP port for health and metrics. Kafka clients use `kafka_port`."""
    kafka_port: Port = 9092
    """Port for Kafka clients; with 0 the system chooses one."""
    fsync: bool = True
    """Whether records are synced to the disk before they are acknowledged. Without it a crash of the machine may lose
    acknowledged records."""
    maintenance_interval_s: Annotated[float, Field(gt=0)] = 30.0
    """Time between two rounds of retention and compaction."""
    file_bytes_max: Annotated[int, Field(ge=0)] = 0
    """Size of the file at which further records are refused; 0 for no limit except `disk_free_bytes_min`, which bounds
    all files of the disk together."""
