"""Our rubrics, as the entry points `headrace.rubrics` announce them. Another package announces its own likewise."""

from __future__ import annotations

from importlib.resources import files

from headrace_judge.rubric import RubricFile

HELPFULNESS = RubricFile(files(__package__) / "helpfulness.toml")
