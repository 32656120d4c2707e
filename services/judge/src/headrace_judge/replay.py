"""Entry point of `python -m headrace_judge.replay`, which judges stored trajectories (`rejudging.py`)."""

from headrace_judge.settings import JudgeSettings
from headrace_runtime.main import Service

SERVICE = Service("judge", "Judges stored trajectories again.", JudgeSettings, "headrace_judge.rejudging:run")

if __name__ == "__main__":
    SERVICE.main()
