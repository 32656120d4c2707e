"""`python -m headrace_judge`."""

from headrace_judge import INFO
from headrace_judge.settings import JudgeSettings
from headrace_runtime.main import STREAM_GARBAGE_THRESHOLD, Service

SERVICE = Service(
    "judge",
    INFO.summary,
    JudgeSettings,
    "headrace_judge.app:run",
    "headrace_judge.app:check",
    garbage_threshold=STREAM_GARBAGE_THRESHOLD,
)

if __name__ == "__main__":
    SERVICE.main()
