"""Rubrics: TOML files with the judge's instructions, its criteria, and the parts of a run that it sees."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from headrace_runtime.errors import SettingError
from headrace_runtime.registries import PluginError, Registry
from headrace_runtime.settings.table import parse_toml, read_toml

SCALE_MIN = 1
SCALE_MAX = 5
Mode = Literal["single", "pair"]
Part = Literal["tools", "instructions", "question", "reasoning", "steps", "tool_calls", "tool_results", "answer"]
_SETTING = "judge.rubrics"


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Criterion(_Table):
    """One question of a rubric.

    The judge answers it with a score in mode `single`, and with a preference in mode `pair`.
    """

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
    description: Annotated[str, Field(min_length=1, max_length=4000)]
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0


class Rubric(_Table):
    """Content of a rubric file. The source of its rewards is `judge:<name>`."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.-]{0,63}$")]
    mode: Mode = "single"
    instructions: Annotated[str, Field(min_length=1, max_length=20_000)]
    criteria: tuple[Criterion, ...] = Field(min_length=1, max_length=16)
    show: tuple[Part, ...] = Field(default=("question", "tool_calls", "tool_results", "answer"), min_length=1)
    """Parts of the run that the judge sees, in the order in which they happened. `steps` are the model's messages
    before the last one, `instructions` are system messages, and `tools` are the tools that were offered."""
    context: tuple[str, ...] = Field(default=(), max_length=16)
    """Keys of the trajectory's context that are shown as facts, for example `expected`. Missing keys are ignored."""
    run_chars_max: Annotated[int, Field(ge=1000, le=1_000_000)] = 24_000
    """Longest run in characters. Entries are removed from the middle of a longer one, and a note has their number."""
    part_chars_max: Annotated[int, Field(ge=100)] = 4_000
    """Longest entry in characters, at most a quarter of `run_chars_max`. The middle of a longer one is removed, and a
    note has the number of characters."""

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        names = [criterion.name for criterion in self.criteria]
        if len(set(names)) < len(names):
            raise ValueError(f"two criteria have one name: {names}")
        if self.part_chars_max * 4 > self.run_chars_max:
            raise ValueError("part_chars_max is more than a quarter of run_chars_max; question and answer need room")
        if not {"answer", "steps", "reasoning", "tool_calls"} & set(self.show):
            raise ValueError("show has no output of the model; add answer, steps, reasoning or tool_calls")
        return self

    @property
    def source(self) -> str:
        """Name of the rubric as a source of rewards."""
        return f"judge:{self.name}"

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each criterion in the total score."""
        return {criterion.name: criterion.weight for criterion in self.criteria}

    @property
    def digest(self) -> str:
        """SHA-256 of the rubric's content, in hexadecimal."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class RubricFile:
    """Entry point of a rubric: the location of its file, in a folder or a package."""

    path: Traversable


RUBRICS: Registry[RubricFile] = Registry("rubrics", RubricFile, "rubric")


def load(reference: str) -> Rubric:
    """Load a rubric by its announced name or by the path of its file. Raises `SettingError`."""
    try:
        if reference in RUBRICS.names():
            return Rubric.model_validate(parse_toml(RUBRICS.get(reference).path.read_bytes()))
        return Rubric.model_validate(read_toml(Path(reference)))
    except PluginError as error:
        raise SettingError(_SETTING, reference, str(error)) from None
    except OSError as error:
        remedy = f"cannot be read: {error.strerror}; name a file, or one of: {', '.join(RUBRICS.names())}"
        raise SettingError(_SETTING, reference, remedy) from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "the file"
        raise SettingError(_SETTING, reference, f"{field}: {first['msg']}") from None
    except ValueError as error:
        raise SettingError(_SETTING, reference, str(error)) from None


def load_all(references: Sequence[str]) -> dict[str, Rubric]:
    """Load several rubrics, and return them by name.

    Raises `SettingError` if one is invalid or if two have the same name.
    """
    rubrics: dict[str, Rubric] = {}
    for reference in references:
        rubric = load(reference)
        if rubric.name in rubrics:
            raise SettingError(_SETTING, reference, f"another rubric is named {rubric.name!r}; rename one of them")
        rubrics[rubric.name] = rubric
    return rubrics
