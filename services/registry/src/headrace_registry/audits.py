"""Filter program `python -m headrace_registry.audits`: it reads versions and prints their scores on audit tasks
(`headrace_schemas.programs`)."""

from headrace_registry.settings import RegistrySettings
from headrace_runtime.main import Service

SERVICE = Service(
    "registry",
    "Plays audit tasks with the gate's program.",
    RegistrySettings,
    "headrace_registry.gate.evaluation:play_audits",
)

if __name__ == "__main__":
    SERVICE.main()
