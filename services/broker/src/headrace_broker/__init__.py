"""Embedded broker: one process that implements the Kafka wire protocol and stores all records in one file."""

from __future__ import annotations

from headrace_runtime.services import ServiceInfo

INFO = ServiceInfo(
    module="headrace_broker",
    summary="The embedded Kafka-wire broker: one process, one file.",
    port=8035,
    is_bus=True,
)
