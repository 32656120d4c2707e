"""Section `broker` of the settings."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from headrace_broker.service import INFO
from headrace_runtime.settings import Port, ServiceSettings, is_loopback

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
Bytes = Annotated[int, Field(ge=1024)]


class BrokerSettings(ServiceSettings):
    """The embedded broker: one machine, one process, one file under `data_dir/broker/`."""

    port: Port = INFO.port
    """HTTP port of health and metrics; clients of the bus use `kafka_port`."""
    kafka_host: str = "127.0.0.1"
    """Loopback address that Kafka clients connect to."""
    kafka_port: Port = 9092
    """Its port; 0 lets the system choose."""
    fsync: bool = True
    """Acknowledge only what is on the disk. Off: what the system has; a crash of the machine may then lose it."""
    file_bytes_max: Annotated[int, Field(ge=0)] = 0
    """Size at which the file takes no more records, 0 for the disk's own. Acknowledged records are kept."""

    connections_max: Count = 512
    """Clients at a time; more are turned away."""
    connection_requests_max: Count = 32
    """Requests of one connection that are worked on at a time; its next ones wait in the socket."""
    connection_idle_s: Seconds = 600.0
    """A connection without requests for this long is closed."""
    transfer_timeout_s: Seconds = 30.0
    """How long a request may take to arrive, and a response to be taken, once begun."""
    request_bytes_max: Bytes = 8 * 1024 * 1024
    """Largest request; a larger one closes its connection."""
    requests_bytes_max: Bytes = 64 * 1024 * 1024
    """Memory for all requests at a time; more wait."""
    fetch_bytes_max: Bytes = 8 * 1024 * 1024
    """Largest response to one Fetch, unless a single batch is larger."""
    fetches_bytes_max: Bytes = 128 * 1024 * 1024
    """Memory for all Fetch responses at a time; more wait."""
    fetch_wait_s: Seconds = 60.0
    """Longest wait of a Fetch for new records, whatever the client asks for."""
    reader_threads: Annotated[int, Field(ge=1, le=16)] = 2
    """Threads that read the file."""

    partitions_max: Count = 4_000
    """Partitions of all topics together."""
    groups_max: Count = 2_000
    """Consumer groups that are known at a time."""
    group_members_max: Count = 250
    """Members of one group."""
    session_timeout_min_s: Seconds = 6.0
    """Shortest session timeout that a group member may ask for."""
    session_timeout_max_s: Seconds = 1800.0
    """Longest one."""
    group_retention_s: Seconds = 30 * 86_400.0
    """Offsets of a group without members are forgotten this long after its last commit."""
    offset_metadata_bytes_max: Count = 4_096
    """Longest text beside a committed offset."""
    transaction_timeout_max_s: Seconds = 900.0
    """Longest transaction."""
    producer_retention_s: Seconds = 7 * 86_400.0
    """Sequence numbers and transactional ids of a producer are forgotten this long after its last batch."""
    timestamp_ahead_max_s: Seconds = 3600.0
    """How far in the future a record's time may be; retention goes by it."""

    maintenance_interval_s: Seconds = 30.0
    """Time between two rounds of retention and compaction."""
    compaction_keys_max: Annotated[int, Field(ge=1000)] = 200_000
    """Distinct keys that one round of compaction holds in memory (about 150 bytes each)."""

    @field_validator("kafka_host")
    @classmethod
    def _loopback(cls, value: str) -> str:
        if not is_loopback(value):
            raise ValueError(
                "this broker is for one machine and listens on loopback only; past one machine, run Apache Kafka"
                " and set bus.address"
            )
        return value
