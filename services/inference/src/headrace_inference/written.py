"""`python -m headrace_inference.written`: conversations in, exact tokens out (`writing/program.py`)."""

from headrace_inference.settings import InferenceSettings
from headrace_runtime.main import Service

SERVICE = Service(
    "inference",
    "Writes conversations as the tokens that a replica would make of them.",
    InferenceSettings,
    "headrace_inference.writing.program:run",
)

if __name__ == "__main__":
    SERVICE.main()
