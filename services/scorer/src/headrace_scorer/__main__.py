"""`python -m headrace_scorer`."""

from headrace_runtime.main import STREAM_GARBAGE_THRESHOLD, Service
from headrace_scorer import INFO
from headrace_scorer.settings import ScorerSettings

SERVICE = Service(
    "scorer",
    INFO.summary,
    ScorerSettings,
    "headrace_scorer.app:run",
    "headrace_scorer.functions.process:check",
    garbage_threshold=STREAM_GARBAGE_THRESHOLD,
)

if __name__ == "__main__":
    SERVICE.main()
