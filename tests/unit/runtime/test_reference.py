"""Reference of every setting: name, kind, default, meaning."""

from __future__ import annotations

from typing import Annotated, Literal

import pytest
from pydantic import Field

from headrace_runtime.registries import OrNameIn, Registry
from headrace_runtime.settings.reference import SettingDoc, describe
from headrace_runtime.settings.sections import Common, Section


class Gate(Section):
    command: tuple[str, ...] = ()
    """Plays the held-out tasks."""
    margin: Annotated[float, Field(ge=0, le=1)] = 0.05


class ServiceSection(Section):
    gate: Gate = Gate()
    strict: Gate = Gate(margin=0.0)
    key: str
    mode: Literal["a", "b"] | None = None
    weights: dict[str, float] = Field(default_factory=lambda: {"feedback": 1.0})
    secret: str = Field(default="", validate_default=True, repr=False)


RUBRICS: Registry[object] = Registry("test_rubrics", object, "rubric")
NOTHING: Registry[object] = Registry("test_nothing", object, "nothing")


class Chosen(Section):
    rubrics: tuple[Annotated[str, OrNameIn(RUBRICS)], ...] = ()
    other: Annotated[str, OrNameIn(NOTHING)] = ""


@pytest.mark.filterwarnings("error")
def test_settings_are_listed_with_values_before_sections() -> None:
    assert list(describe(ServiceSection, "own.")) == [
        SettingDoc(name="own.key", kind="string", required=True),
        SettingDoc(name="own.mode", kind='"a" or "b" or null'),
        SettingDoc(name="own.weights", kind="table", default={"feedback": 1.0}),
        SettingDoc(name="own.secret", kind="string", default=""),
        SettingDoc(name="own.gate.command", kind="list of string", default=[], description="Plays the held-out tasks."),
        SettingDoc(name="own.gate.margin", kind="number ≥ 0 ≤ 1", default=0.05),
        SettingDoc(
            name="own.strict.command", kind="list of string", default=[], description="Plays the held-out tasks."
        ),
        SettingDoc(name="own.strict.margin", kind="number ≥ 0 ≤ 1", default=0.0),
    ]


def test_every_common_setting_says_what_it_is() -> None:
    assert [doc.name for doc in describe(Common) if not doc.description] == []


def test_names_that_are_installed_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RUBRICS, "names", lambda: ("helpful", "safe"))
    assert [doc.kind for doc in describe(Chosen)] == ["list of string; installed: helpful, safe", "string"]
    assert Chosen(rubrics=("mine.toml",)).rubrics == ("mine.toml",), "a path is one as well"
