"""Program of the registry: `python -m headrace_registry`."""

from headrace_registry import INFO
from headrace_registry.settings import RegistrySettings
from headrace_runtime.main import Service

SERVICE = Service(
    "registry",
    INFO.summary,
    RegistrySettings,
    "headrace_registry.app:run",
    "headrace_registry.check:check",
)

if __name__ == "__main__":
    SERVICE.main()
