"""Reward source that prefers short answers: `python with_sdk.py [HOST:PORT]`."""

import sys

from headrace.rewards import serve
from headrace_schemas import Trajectory


def short(trajectory: Trajectory) -> float | None:
    """Return 1.0 for no words, falling to 0.0 for fifty and more. Abstain from a run without an answer."""
    words = len(trajectory.final_answer.split())
    return max(0.0, 1.0 - words / 50) if words else None


if __name__ == "__main__":
    serve(short, source="short", bus=sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:9092")
