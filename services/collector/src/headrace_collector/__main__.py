"""`python -m headrace_collector`."""

from headrace_collector import INFO
from headrace_collector.settings import CollectorSettings
from headrace_runtime.main import STREAM_GARBAGE_THRESHOLD, Service

SERVICE = Service(
    "collector",
    INFO.summary,
    CollectorSettings,
    "headrace_collector.app:run",
    garbage_threshold=STREAM_GARBAGE_THRESHOLD,
)

if __name__ == "__main__":
    SERVICE.main()
