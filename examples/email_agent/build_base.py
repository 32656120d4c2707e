"""Builds the base model: a Qwen3 of 0.4 million parameters, its tokenizer, and a warm-up of less than a minute.

    python -m email_agent.build_base --cache ~/.cache/headrace/email_agent

prints the model's folder. The result stays there under a digest of all that went into it, for the next run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from email_agent import tokenizer, warm_up
from email_agent.tools import DEFINITIONS
from example_parts import base_model


@dataclass(frozen=True)
class Recipe(base_model.Recipe):
    """What decides the weights, besides files."""

    schedule: warm_up.Schedule = field(default_factory=warm_up.Schedule)


LESSON = base_model.Lesson(
    name="email_agent",
    folder=Path(__file__).parent,
    modules=("words", "mailbox", "tools", "tasks", "react", "demonstrations", "tokenizer", "warm_up", "build_base"),
    definitions=DEFINITIONS,
    conversations=warm_up.conversations,
    tokenizer=tokenizer.train,
)


def build(cache: Path, recipe: Recipe | None = None) -> Path:
    """The folder of the base model in `cache`, built first unless it is there. Two builders at once do no harm."""
    return LESSON.build(cache, recipe or Recipe())


def main() -> None:
    LESSON.command(lambda seed: Recipe(seed=seed))


if __name__ == "__main__":
    main()
