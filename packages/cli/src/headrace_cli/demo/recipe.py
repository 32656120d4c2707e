"""The file `demo.toml`: commands of a demo, settings of Headrace, and the goal of the demo."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from headrace.errors import UsageError
from headrace_cli.demo.measures import DemoMeasure, RowsRecipe
from headrace_runtime.process.programs import VariableName
from headrace_runtime.settings.table import read_toml

Positive = Annotated[float, Field(gt=0)]


class Goal(BaseModel):
    """Bounds of the agent's work and minimum result of the demo."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tasks: Annotated[int, Field(ge=0)] = 0
    """Number of tasks that the agent works on, the `{tasks}` of its command; 0: until `traffic_s_max`."""
    traffic_s_max: Positive
    """Maximum time of the agent's work in seconds. With `tasks` or rows only a run that hangs reaches it, so that a
    busy machine gives the same result later."""
    enough_gain: float = math.inf
    """The agent stops earlier once a promoted version exceeds the first one by this gain and `swaps_min` is reached."""
    gain_min: float
    """Minimum gain of held-out success, in 0..1."""
    swaps_min: Annotated[int, Field(ge=0)]
    """Minimum number of versions that take over while the agent works."""


class SignalRecipe(BaseModel):
    """Variant of the demo with another kind of user feedback, from the table `[signals.NAME]`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    agent: tuple[str, ...] = ()
    """Arguments that are added to the agent's command."""
    settings: dict[str, JsonValue] = Field(default_factory=dict)
    """Settings of Headrace by dotted name; they override `config`."""
    goal: Goal | None = None
    """Goal of the variant; None takes that of the recipe."""
    short: Goal | None = None


class Opponent(BaseModel):
    """A model with the base model's weights that a demo registers and serves, but never trains.

    An example is the opponent in a game.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    label: Annotated[str, Field(min_length=1)]
    """Label of the opponent's version, which the agent calls as `NAME:LABEL`."""


class Recipe(BaseModel):
    """Contents of a `demo.toml`.

    In commands the placeholders `{python} {cache} {seed} {tasks} {base_url} {gateway} {model} {version} {out}` are
    replaced, and in the agent's command of a recipe with rows also `{row_before} {row}`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    title: str
    model: str
    """Model name that the agent calls."""
    config: Path
    """Settings file of Headrace, relative to the folder."""
    base: tuple[str, ...]
    """Command that builds the base model unless it exists; the last line of its output is the folder."""
    agent: tuple[str, ...]
    """Command of the agent. It ends by itself or on SIGTERM, and writes its summary to `{out}/agent.json`. The progress
    display shows the `tasks` of a summary that it replaces while it works."""
    measure: tuple[str, ...]
    """Command that plays the audit tasks with `{version}` and other seeds than the registry, and prints a line of JSON
    with a `score` for each play."""
    measures: dict[str, DemoMeasure] = Field(default_factory=dict)
    """Further measures of the first and last version with their promises, by name in the order of the table."""
    rows: RowsRecipe | None = None
    """Measurements between the first and the last version; the agent then works from row to row."""
    shown: str | None = None
    """Field of the lines of `measure` whose text is printed for one task, before and after."""
    models: dict[str, Opponent] = Field(default_factory=dict)
    """Untrained models by name."""
    checks: tuple[str, ...] = ()
    """Command that checks promises without services and prints a line of JSON with `name`, `wanted`, `found` and
    `holds` for each."""
    goal: Goal
    short: Goal
    """Goal with `--short`."""
    signals: dict[str, SignalRecipe] = Field(default_factory=dict)
    """Variants by kind of feedback (`headrace demo --signal NAME`)."""
    settings: dict[str, JsonValue] = Field(default_factory=dict)
    """Settings of Headrace by dotted name; those of the command line override them."""
    environment: tuple[VariableName, ...] = ()
    """Environment variables that the commands get in addition to those of the system."""
    folder: Path = Path()

    def with_signal(self, name: str) -> Recipe:
        """Return the recipe changed by its variant `name`.

        Raises:
            UsageError: the recipe has no such variant.
        """
        if name not in self.signals:
            signals = ", ".join(self.signals) or "none"
            raise UsageError(f"--signal {name}: {self.folder / 'demo.toml'} has no [signals.{name}]; it has {signals}")
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
        """Return the recipe's command `name`, with each placeholder replaced by its entry of `values`."""
        replacements = {"python": sys.executable, "model": self.model, **values}
        return [part.format(**replacements) for part in getattr(self, name)]


def default_folder() -> Path:
    """Return the folder of the e-mail agent, from the distribution headrace-demo or from a checkout in this directory.

    Raises:
        UsageError: neither exists.
    """
    try:
        folder = Path(str(distribution("headrace-demo").locate_file("headrace_demo/email_agent")))
    except PackageNotFoundError:
        folder = Path("examples/email_agent")
    if not (folder / "demo.toml").is_file():
        raise UsageError("the data of the demo is not installed: pip install 'headrace[local]', or name its folder")
    return folder


def read(folder: Path) -> Recipe:
    """Read the recipe in a demo's folder.

    Raises:
        UsageError: the folder has no valid `demo.toml`.
    """
    path = folder / "demo.toml"
    try:
        data = read_toml(path)
        return Recipe.model_validate({**data, "folder": folder.absolute()})
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; name the folder of a demo, such as examples/email_agent") from None
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from None
