"""`python -m headrace_broker` and the entry point of `headrace up`."""

from __future__ import annotations

from headrace_broker.settings import BrokerSettings
from headrace_runtime.main import Service

SERVICE = Service(
    "broker", "The embedded Kafka-wire broker: one process, one file.", BrokerSettings, "headrace_broker.app:run"
)

if __name__ == "__main__":
    SERVICE.main()
