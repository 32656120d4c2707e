"""`python -m headrace_trainer.short_training`: trains a version of a scratch lineage from experiences."""

from headrace_runtime.main import Service
from headrace_trainer.settings import TrainerSettings

SERVICE = Service(
    "trainer", "Trains a scratch lineage without a bus.", TrainerSettings, "headrace_trainer.offline.short_run:run"
)

if __name__ == "__main__":
    SERVICE.main()
