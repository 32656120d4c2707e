"""The file `demo.toml`: the commands of a demo, settings of Headrace, and the goal at which it stops."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from headrace.errors import UsageError
from headrace_cli.demo.measures import DemoMeasure
from headrace_cli.demo.rows import RowsRecipe
from headrace_runtime.program_environment import VariableName
from headrace_runtime.settings_table import parse_toml

Positive = Annotated[float, Field(gt=0)]


class Goal(BaseModel):
    """When the agent may stop working, and what makes the demo a success."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    traffic_s_max: Positive
    """The agent works at most this long."""
    enough_gain: float = math.inf
    """It stops earlier once a promoted version is this much better than the first one, and `swaps_min` is reached."""
    gain_min: float
    """Held-out success has to rise by this much, in 0..1."""
    swaps_min: Annotated[int, Field(ge=0)]
    """This many versions have to take over while the agent works."""


class SignalRecipe(BaseModel):
    """How the same demo is played when its users say something else: `[signals.NAME]`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    agent: tuple[str, ...] = ()
    """What is added to the agent's command."""
    settings: dict[str, JsonValue] = Field(default_factory=dict)
    """Settings of Headrace by their dotted names, instead of those of `config`."""
    goal: Goal | None = None
    """Instead of the recipe's."""
    short: Goal | None = None


class Opponent(BaseModel):
    """A model beside the one that learns, made of the base model's folder: registered, served and pinned."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    label: Annotated[str, Field(min_length=1)]
    """Of its version: the agent asks for `NAME:LABEL`."""


class Recipe(BaseModel):
    """`demo.toml`. In commands `{python} {cache} {seed} {base_url} {gateway} {model} {version} {out}` are replaced, and
    where there are rows `{row_before} {row}` in the agent's."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    title: str
    model: str
    """The name that the agent asks for."""
    config: Path
    """Settings of Headrace, relative to the folder."""
    base: tuple[str, ...]
    """Builds the base model, or finds it built; the last line that it prints is the folder."""
    agent: tuple[str, ...]
    """The agent at work. Ends by itself or on SIGTERM, and writes its summary to `{out}/agent.json`."""
    measure: tuple[str, ...]
    """Plays the audit tasks with `{version}`, with other seeds than the registry does, and prints a line of JSON with a
    `score` for each."""
    measures: dict[str, DemoMeasure] = Field(default_factory=dict)
    """What else is told of the first and of the last version, and promised, by name in the order of the table."""
    rows: RowsRecipe | None = None
    """Measures between the first version and the last one. Then the agent works from row to row."""
    shown: str | None = None
    """A text in the lines of `measure` that is printed before and after, of one task."""
    models: dict[str, Opponent] = Field(default_factory=dict)
    """Models that nobody trains, by name."""
    checks: tuple[str, ...] = ()
    """Checks something without any service, and prints a line of JSON with `name`, `wanted`, `found` and `holds` for
    each promise."""
    seed_s_max: Positive | None = None
    """`--seeds`: each may take this long, base model included."""
    goal: Goal
    short: Goal
    """The goal with `--short`."""
    signals: dict[str, SignalRecipe] = Field(default_factory=dict)
    """What users may say (`headrace demo --signal NAME`), by name."""
    settings: dict[str, JsonValue] = Field(default_factory=dict)
    """Settings of Headrace by their dotted names, before those of the command line."""
    environment: tuple[VariableName, ...] = ()
    """Environment variables that the commands get besides the system's own."""
    folder: Path = Path()

    def with_signal(self, name: str) -> Recipe:
        """The recipe of a signal. Raises `UsageError` for one that it has not."""
        if name not in self.signals:
            known = ", ".join(self.signals) or "none"
            raise UsageError(f"--signal {name}: {self.folder / 'demo.toml'} has no [signals.{name}]; there are {known}")
        chosen = self.signals[name]
        return self.model_copy(
            update={
                "agent": (*self.agent, *chosen.agent),
                "settings": {**self.settings, **chosen.settings},
                "goal": chosen.goal or self.goal,
                "short": chosen.short or self.short,
            }
        )

    def command(self, name: str, values: Mapping[str, object]) -> list[str]:
        """A command with everything filled in."""
        filled = {"python": sys.executable, "model": self.model, **values}
        return [part.format(**filled) for part in getattr(self, name)]


def read(folder: Path) -> Recipe:
    """Raises `UsageError` when the folder holds no demo or the demo is wrong."""
    path = folder / "demo.toml"
    try:
        data = parse_toml(path.read_bytes())
        return Recipe.model_validate({**data, "folder": folder.absolute()})
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; name the folder of a demo, e.g. examples/email_agent") from None
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from None
