"""Program of the broker: `python -m headrace_broker`, which `headrace up` also starts."""

from __future__ import annotations

from headrace_broker import INFO
from headrace_broker.settings import BrokerSettings
from headrace_runtime.main import Service

SERVICE = Service("broker", INFO.summary, BrokerSettings, "headrace_broker.app:run")

if __name__ == "__main__":
    SERVICE.main()
