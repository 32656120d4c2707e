"""Entry point of `python -m headrace_inference.written`, which tokenizes conversations (`writing/program.py`)."""

from headrace_inference.settings import InferenceSettings
from headrace_runtime.main import Service

SERVICE = Service(
    "inference",
    "Tokenizes conversations as a replica would.",
    InferenceSettings,
    "headrace_inference.writing.program:run",
)

if __name__ == "__main__":
    SERVICE.main()
