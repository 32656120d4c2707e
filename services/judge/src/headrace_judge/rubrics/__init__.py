"""Shipped rubrics, announced under the entry points `headrace.rubrics`. Other packages can announce further ones."""

from __future__ import annotations

from importlib.resources import files

from headrace_judge.rubric import RubricFile

HELPFULNESS = RubricFile(files(__package__) / "helpfulness.toml")
