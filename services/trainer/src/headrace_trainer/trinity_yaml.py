"""`python -m headrace_trainer.trinity_yaml`: what Trinity would be told, for `headrace trinity config`."""

from headrace_runtime.main import Service
from headrace_trainer.settings import TrainerSettings

SERVICE = Service(
    "trainer",
    "Prints Trinity's configuration.",
    TrainerSettings,
    "headrace_trainer.trinity_learner.print_configuration:run",
)

if __name__ == "__main__":
    SERVICE.main()
