"""Entry point of `python -m headrace_scorer.replay`, which scores trajectories again (`rescoring.py`)."""

from headrace_runtime.main import Service
from headrace_scorer.settings import ScorerSettings

SERVICE = Service("scorer", "Scores stored trajectories again.", ScorerSettings, "headrace_scorer.rescoring:run")

if __name__ == "__main__":
    SERVICE.main()
