"""Entry point of `python -m headrace_inference.importer`, which stores folders as versions (`importing/program.py`)."""

from headrace_inference.settings import InferenceSettings
from headrace_runtime.main import Service

SERVICE = Service(
    "inference",
    "Makes versions of folders, and folders of versions.",
    InferenceSettings,
    "headrace_inference.importing.program:run",
)

if __name__ == "__main__":
    SERVICE.main()
