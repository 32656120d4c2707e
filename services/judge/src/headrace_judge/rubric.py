"""A rubric: what is judged, by which criteria, on which parts of a run. A TOML file, shipped or the user's own."""

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
from headrace_runtime.settings_table import parse_toml

SCALE_MIN = 1
SCALE_MAX = 5
Mode = Literal["single", "pair"]
Part = Literal["tools", "instructions", "question", "reasoning", "steps", "tool_calls", "tool_results", "answer"]
_SETTING = "judge.rubrics"


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Criterion(_Table):
    """One question that the judge answers, on the scale in mode `single`, with a preference in mode `pair`."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
    description: Annotated[str, Field(min_length=1, max_length=4000)]
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0


class Rubric(_Table):
    """The file. Its name makes the source of its rewards: `judge:<name>`."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.-]{0,63}$")]
    mode: Mode = "single"
    instructions: Annotated[str, Field(min_length=1, max_length=20_000)]
    criteria: tuple[Criterion, ...] = Field(min_length=1, max_length=16)
    show: tuple[Part, ...] = Field(default=("question", "tool_calls", "tool_results", "answer"), min_length=1)
    """Parts of the run that the judge sees, always in the order in which they happened. `steps` is what the model said
    before its last message, `instructions` are system messages, `tools` the tools that it was offered."""
    context: tuple[str, ...] = Field(default=(), max_length=16)
    """Keys of the trajectory's context that are shown as facts, e.g. `expected`; those that are missing are not."""
    run_chars_max: Annotated[int, Field(ge=1000, le=1_000_000)] = 24_000
    """Longest run, in characters: entries are left out of its middle, and a note says how many."""
    part_chars_max: Annotated[int, Field(ge=100)] = 4_000
    """Longest entry: its middle is left out, and a note says how much. At most a quarter of `run_chars_max`."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [criterion.name for criterion in self.criteria]
        if len(set(names)) < len(names):
            raise ValueError(f"two criteria have one name: {names}")
        if self.part_chars_max * 4 > self.run_chars_max:
            raise ValueError("part_chars_max is more than a quarter of run_chars_max; question and answer need room")
        if not {"answer", "steps", "reasoning", "tool_calls"} & set(self.show):
            raise ValueError("show has nothing that the model did; add answer, steps, reasoning or tool_calls")
        return self

    @property
    def source(self) -> str:
        return f"judge:{self.name}"

    @property
    def weights(self) -> dict[str, float]:
        return {criterion.name: criterion.weight for criterion in self.criteria}

    @property
    def digest(self) -> str:
        """SHA-256 of everything that the file says."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class RubricFile:
    """An announcement: where the file is, in a folder or a package."""

    path: Traversable


RUBRICS: Registry[RubricFile] = Registry("rubrics", RubricFile, "rubric")


def load(reference: str) -> Rubric:
    """The rubric that is announced by that name, or the file at that path. Raises `SettingError`."""
    try:
        path = RUBRICS.get(reference).path if reference in RUBRICS.names() else Path(reference)
        return Rubric.model_validate(parse_toml(path.read_bytes()))
    except PluginError as error:
        raise SettingError(_SETTING, reference, str(error)) from None
    except OSError as error:
        remedy = f"cannot be read: {error.strerror}; name a file, or one of: {', '.join(RUBRICS.names())}"
        raise SettingError(_SETTING, reference, remedy) from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise SettingError(_SETTING, reference, f"{where}: {first['msg']}") from None
    except ValueError as error:
        raise SettingError(_SETTING, reference, str(error)) from None


def load_all(references: Sequence[str]) -> dict[str, Rubric]:
    """Rubrics by name. Raises `SettingError`, also when two have one name."""
    rubrics: dict[str, Rubric] = {}
    for reference in references:
        rubric = load(reference)
        if rubric.name in rubrics:
            raise SettingError(_SETTING, reference, f"a rubric named {rubric.name!r} is there already; rename one")
        rubrics[rubric.name] = rubric
    return rubrics
