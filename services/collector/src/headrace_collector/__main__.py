"""`python -m headrace_collector`."""

from headrace_collector.service import INFO
from headrace_collector.settings import Settings
from headrace_runtime.main import Service

SERVICE = Service("collector", INFO.summary, Settings, "headrace_collector.app:run")

if __name__ == "__main__":
    SERVICE.main()
