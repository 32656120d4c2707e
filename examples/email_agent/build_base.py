"""Build the base model: a Qwen3 of 0.4 million parameters, its tokenizer, and a warm-up of less than a minute.

    python -m email_agent.build_base --cache ~/.cache/headrace/email_agent

prints the model's folder. The folder is named by a digest of all inputs and reused by the next run.
"""

from __future__ import annotations

from pathlib import Path

from email_agent import tokenizer, warm_up
from email_agent.tools import DEFINITIONS
from example_parts.base_model import Lesson

LESSON = Lesson(
    name="email_agent",
    folder=Path(__file__).parent,
    modules=("words", "mailbox", "tools", "tasks", "demonstrations", "tokenizer", "warm_up", "build_base"),
    definitions=DEFINITIONS,
    schedule=warm_up.Schedule(),
    conversations=warm_up.conversations,
    tokenizer=tokenizer.train,
)


if __name__ == "__main__":
    LESSON.command()
