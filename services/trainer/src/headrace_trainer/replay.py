"""`python -m headrace_trainer.replay`: what training would do with experiences, without a model (`rehearsal.py`)."""

from headrace_runtime.main import Service
from headrace_trainer.settings import TrainerSettings

SERVICE = Service(
    "trainer", "Rehearses training: experiences in, batches out.", TrainerSettings, "headrace_trainer.rehearsal:run"
)

if __name__ == "__main__":
    SERVICE.main()
