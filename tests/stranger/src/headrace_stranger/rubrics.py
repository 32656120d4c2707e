"""A rubric."""

from importlib.resources import files

from headrace_judge.rubric import RubricFile

POLITE = RubricFile(files(__package__) / "polite.toml")
