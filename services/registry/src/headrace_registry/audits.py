"""`python -m headrace_registry.audits`: versions in, their plays of audit tasks out (`auditing.py`)."""

from headrace_registry.settings import RegistrySettings
from headrace_runtime.main import Service

SERVICE = Service(
    "registry", "Has the gate's program play audit tasks.", RegistrySettings, "headrace_registry.auditing:run"
)

if __name__ == "__main__":
    SERVICE.main()
