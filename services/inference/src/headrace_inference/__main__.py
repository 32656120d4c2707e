"""`python -m headrace_inference`"""

from headrace_inference.service import INFO
from headrace_inference.settings import InferenceSettings
from headrace_runtime.main import Service

SERVICE = Service(
    name="inference",
    summary=INFO.summary,
    settings=InferenceSettings,
    run="headrace_inference.app:run",
)

if __name__ == "__main__":
    SERVICE.main()
