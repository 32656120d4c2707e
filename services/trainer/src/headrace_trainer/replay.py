"""`python -m headrace_trainer.replay`: plans the training of experiences without a model (`dry_run.py`)."""

from headrace_runtime.main import Service
from headrace_trainer.settings import TrainerSettings

SERVICE = Service(
    "trainer",
    "A dry run of training: experiences in, batches out.",
    TrainerSettings,
    "headrace_trainer.offline.dry_run:run",
)

if __name__ == "__main__":
    SERVICE.main()
