"""Announcements of installed packages: found by name, loaded once, and errors name the package."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import pytest

from headrace_runtime import registries
from headrace_runtime.errors import SettingError
from headrace_runtime.registries import NameIn, PluginError, Registry
from headrace_runtime.services import ServiceInfo, installed
from headrace_runtime.settings.reference import describe
from headrace_runtime.settings.sections import Section, ServiceSettings, complete, load
from tests.support import plugins


class Colour(Section):
    """An announced kind."""

    depth: int = 3
    """How deep."""


COLOURS: Registry[Colour] = Registry("colours", Colour, "colour")


class Paint(Section):
    """A section in which packages have sections."""

    colour: Annotated[str, NameIn(COLOURS)] = "red"
    """Name of the kind."""

    @classmethod
    def announced(cls) -> dict[str, type[Section]]:
        return {name: type(colour) for name, colour in COLOURS.all().items()}


class Settings(ServiceSettings):
    """Settings of a service."""

    paint: Paint = Paint()
    thin: Paint = Paint.model_construct(colour="green")


MODULE = """
import sys
from pathlib import Path
from tests.unit.runtime.test_registries import Colour
with (Path(__file__).parent / "imported").open("a") as file:
    file.write("x")
RED, GREEN, GREY = Colour(depth=1), Colour(depth=2), "grey"
"""


@pytest.fixture
def paints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package with two colours, one that is none, and one that cannot be imported."""
    names = {"red": "RED", "green": "GREEN", "grey": "GREY", "gone": "GONE"}
    announces = {"headrace.colours": {name: f"paints:{value}" for name, value in names.items()}}
    plugins.install(tmp_path, "the-paints", announces, paints=MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "paints", raising=False)
    return tmp_path


def test_names_are_known_without_importing_anything(paints: Path) -> None:
    assert COLOURS.names() == ("gone", "green", "grey", "red")
    assert not (paints / "imported").exists()
    assert [COLOURS.get("red").depth, COLOURS.get("green").depth, COLOURS.get("red").depth] == [1, 2, 1]
    assert (paints / "imported").read_text() == "x"


def test_an_unknown_name_is_refused_with_those_there_are(paints: Path) -> None:
    with pytest.raises(PluginError, match=r"'gren'; did you mean 'green'\? there are gone, green, grey, red"):
        COLOURS.get("gren")
    with pytest.raises(PluginError, match="there are none"):
        Registry("shapes", Colour, "shape").get("round")


def test_what_cannot_be_used_is_said_of_its_package(paints: Path) -> None:
    with pytest.raises(PluginError, match=r"the-paints 1\.0 announces .* 'gone' as paints:GONE.*AttributeError"):
        COLOURS.get("gone")
    with pytest.raises(PluginError, match=r"the-paints 1\.0 .*has to be a .*Colour and is a str; repair or uninstall"):
        COLOURS.get("grey")


def test_two_packages_with_one_name_are_both_named(paints: Path, tmp_path: Path) -> None:
    plugins.install(tmp_path, "other", {"headrace.colours": {"red": "paints:RED"}})
    registries._read.cache_clear()
    with pytest.raises(PluginError, match=r"(other|the-paints) 1\.0 and (other|the-paints) 1\.0 both announce"):
        COLOURS.get("red")


def test_of_two_copies_of_a_package_the_first_is_the_one(
    paints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugins.install(tmp_path / "later", "the-paints", {"headrace.colours": {"red": "paints:GREEN"}})
    monkeypatch.setattr("sys.path", [*sys.path, str(tmp_path / "later")])
    assert COLOURS.get("red").depth == 1


def test_a_setting_is_one_of_the_names_and_a_package_has_a_section_in_a_section(
    paints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(COLOURS, "names", lambda: ("green", "red"))
    path = tmp_path / "c.toml"
    path.write_text("[x.paint.green]\ndepth = 7\n[x.thin]\ncolour = 'red'\n")
    settings = load("x", Settings, path, {})[1]
    assert (settings.paint.colour, settings.thin.colour) == ("red", "red")
    assert [settings.paint.of(name).model_dump() for name in ("green", "red")] == [{"depth": 7}, {"depth": 3}]
    assert Settings().paint.of("green").model_dump() == {"depth": 3}
    docs = {doc.name: doc for doc in describe(complete(Settings), "x.")}
    assert docs["x.paint.colour"].kind == '"green" or "red"'
    assert (docs["x.paint.green.depth"].default, docs["x.thin.colour"].default) == (3, "green")
    for text, message in (
        ("[x.paint.green]\ndepht = 7\n", "x.paint.green.depht = 7: unknown; did you mean 'depth'"),
        ("[x.paint]\ncolour = 'blue'\n", "x.paint.colour = 'blue': no installed package announces the colour 'blue'"),
    ):
        path.write_text(text)
        with pytest.raises(SettingError) as refused:
            load("x", Settings, path, {})
        assert message in str(refused.value)


def test_a_section_that_is_there_already_is_no_name_for_a_package(
    paints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Paint, "announced", classmethod(lambda _cls: {"colour": Colour}))
    with pytest.raises(PluginError, match="a package announces settings as 'colour', which Paint has"):
        complete(Settings)


def test_ours_announce_themselves_like_anybody() -> None:
    assert {"gateway", "broker", "collector", "scorer", "judge", "trainer", "registry", "inference"} <= set(installed())
    assert all(isinstance(info, ServiceInfo) for info in installed().values())
