"""`python -m headrace_trainer`."""

import os

from headrace_runtime.main import PYTHON_GARBAGE_THRESHOLD, Service
from headrace_trainer import INFO
from headrace_trainer.settings import TrainerSettings

SERVICE = Service(
    "trainer",
    INFO.summary,
    TrainerSettings,
    "headrace_trainer.app:run",
    "headrace_trainer.check:check",
    PYTHON_GARBAGE_THRESHOLD,
    notes="headrace_trainer.check:notes",
    suggest="headrace_trainer.check:suggest",
)

if __name__ == "__main__":
    # Read when torch is loaded. Otherwise a waiting thread would spin on a CPU that other processes need.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    SERVICE.main()
