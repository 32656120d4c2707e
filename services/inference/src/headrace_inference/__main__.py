"""`python -m headrace_inference`"""

from headrace_inference import INFO
from headrace_inference.settings import InferenceSettings
from headrace_runtime.main import PYTHON_GARBAGE_THRESHOLD, Service

SERVICE = Service(
    name="inference",
    summary=INFO.summary,
    settings=InferenceSettings,
    run="headrace_inference.app:run",
    garbage_threshold=PYTHON_GARBAGE_THRESHOLD,
)

if __name__ == "__main__":
    SERVICE.main()
