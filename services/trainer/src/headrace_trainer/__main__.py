"""`python -m headrace_trainer`."""

from headrace_runtime.main import Service
from headrace_trainer.service import INFO
from headrace_trainer.settings import TrainerSettings

SERVICE = Service(
    "trainer",
    INFO.summary,
    TrainerSettings,
    "headrace_trainer.app:run",
    "headrace_trainer.check:check",
)

if __name__ == "__main__":
    SERVICE.main()
