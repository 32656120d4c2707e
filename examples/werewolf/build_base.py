"""Build the base model: a Qwen3 of 0.4 million parameters, its tokenizer, and a warm-up of about a minute.

    python -m werewolf.build_base --cache ~/.cache/headrace/werewolf

prints the model's folder. The folder is named by a digest of all inputs and reused by the next run. Villagers are
registered from the same folder and do not change.
"""

from __future__ import annotations

from pathlib import Path

from example_parts.base_model import Lesson
from werewolf import tokenizer, warm_up

LESSON = Lesson(
    name="werewolf",
    folder=Path(__file__).parent,
    modules=("rules", "policies", "talk", "demonstrations", "tokenizer", "warm_up", "build_base"),
    definitions=(),
    schedule=warm_up.Schedule(),
    conversations=warm_up.conversations,
    tokenizer=tokenizer.train,
)


if __name__ == "__main__":
    LESSON.command()
