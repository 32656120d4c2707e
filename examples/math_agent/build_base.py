"""Build the base model: a Qwen3 of 0.4 million parameters, its tokenizer, and a warm-up of about a minute.

    python -m math_agent.build_base --cache ~/.cache/headrace/math_agent

prints the model's folder. The folder is named by a digest of all inputs and reused by the next run.
"""

from __future__ import annotations

from pathlib import Path

from example_parts.base_model import Lesson
from math_agent import tokenizer, warm_up
from math_agent.calculator import DEFINITIONS

LESSON = Lesson(
    name="math_agent",
    folder=Path(__file__).parent,
    modules=(
        "problems", "calculator", "react", "solution", "demonstrations", "tokenizer", "warm_up", "build_base",
    ),
    definitions=DEFINITIONS,
    schedule=warm_up.Schedule(),
    conversations=warm_up.conversations,
    tokenizer=tokenizer.train,
)  # fmt: skip


if __name__ == "__main__":
    LESSON.command()
