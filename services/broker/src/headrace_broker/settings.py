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

    connections_max: Count = 512
    """Maximum number of connected clients. Further connections are refused."""
    connection_requests_max: Count = 32
    """Maximum number of concurrent requests of one connection. Further requests wait in the socket."""
    connection_idle_s: Seconds = 600.0
    """Seconds without a request after which a connection is closed."""
    transfer_timeout_s: Seconds = 30.0
    """Time limit in seconds for receiving one request, and for sending one response."""
    request_bytes_max: Bytes = 8 * 1024 * 1024
    """Largest request in bytes. A larger one closes its connection."""
    requests_bytes_max: Bytes = 64 * 1024 * 1024
    """Memory for all requests in progress. Further requests wait."""
    fetch_bytes_max: Bytes = 8 * 1024 * 1024
    """Largest response to one Fetch in bytes, unless a single batch is larger."""
    fetches_bytes_max: Bytes = 128 * 1024 * 1024
    """Memory for all Fetch responses in progress. Further ones wait."""
    fetch_wait_s: Seconds = 60.0
    """Longest wait of a Fetch for new records, even if the client requests a longer one."""
    reader_threads: Annotated[int, Field(ge=1, le=16)] = 2
    """Number of threads that read the file."""

    partitions_max: Count = 4_000
    """Maximum number of partitions of all topics together."""
    groups_max: Count = 2_000
    """Maximum number of consumer groups."""
    group_members_max: Count = 250
    """Maximum number of members of one group."""
    session_timeout_min_s: Seconds = 6.0
    """Shortest session timeout that a group member may choose."""
    session_timeout_max_s: Seconds = 1800.0
    """Longest session timeout that a group member may choose."""
    group_retention_s: Seconds = 30 * 86_400.0
    """Seconds after the last commit at which the offsets of a group without members are deleted."""
    offset_metadata_bytes_max: Count = 4_096
    """Maximum length of the metadata of a committed offset."""
    transaction_timeout_max_s: Seconds = 900.0
    """Longest timeout of a transaction that a producer may choose."""
    producer_retention_s: Seconds = 7 * 86_400.0
    """Seconds after the last batch of a producer at which its sequence numbers and transactional ids are deleted."""
    timestamp_ahead_max_s: Seconds = 3600.0
    """Maximum time by which a record's timestamp may be in the future, because retention uses it."""

    maintenance_interval_s: Seconds = 30.0
    """Time between two rounds of retention and compaction."""
    compaction_keys_max: Annotated[int, Field(ge=1000)] = 200_000
    """Maximum number of distinct keys of one compaction pass in memory (about 150 bytes each)."""

    @field_validator("kafka_host")
    @classmethod
    def _loopback(cls, value: str) -> str:
        if not is_loopback(value):
            raise ValueError(
                "the embedded broker listens on loopback only; for several machines run Apache Kafka"
                " and set bus.address"
            )
        return value
