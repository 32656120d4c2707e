"""Tests of settings and packages at the start of a service.

They cover the check of shared settings, the reference of all settings, published and secret settings, and the entry
points of installed packages.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field, SecretStr
from starlette.testclient import TestClient

from headrace_runtime import check, registries
from headrace_runtime.errors import SettingError, Unavailable
from headrace_runtime.http import web
from headrace_runtime.http.web import public_settings, settings_route
from headrace_runtime.kafka import topics
from headrace_runtime.registries import NameIn, OrNameIn, PluginError, Registry
from headrace_runtime.services import ServiceInfo, installed_services
from headrace_runtime.settings.reference import SettingDoc, describe
from headrace_runtime.settings.sections import (
    BusSettings,
    Common,
    Section,
    SecuritySettings,
    ServiceSettings,
    complete,
    load,
)
from tests.support import packages
from tests.support.processes import free_port


async def problems(name: str = "gateway", **settings: object) -> list[str]:
    return await check.find_problems(name, Common.model_validate(settings), None, None, bus=False)


async def test_nothing_is_wrong_and_nothing_is_made(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    assert await problems("scorer", data_dir=folder) == []
    assert not folder.exists()


async def test_a_data_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (problem,) = await problems(data_dir=tmp_path / "file" / "data")
    assert problem == f"setting data_dir = '{tmp_path}/file/data': {tmp_path}/file is not a folder"


async def test_blobs_that_nobody_can_reach(tmp_path: Path) -> None:
    (problem,) = await problems(data_dir=tmp_path, blobs={"url": "nosuchprotocol://x"})
    assert "setting blobs.url = 'nosuchprotocol://x'" in problem


async def test_only_who_has_a_database_asks_for_it_and_no_password_is_told(tmp_path: Path) -> None:
    url = f"postgresql://headrace:hunter2@127.0.0.1:{free_port()}/headrace"
    assert await problems("gateway", data_dir=tmp_path, database={"url": url}) == []
    (problem,) = await problems("scorer", data_dir=tmp_path, database={"url": url})
    assert problem.startswith("setting database.url: ")
    assert "hunter2" not in problem


async def test_a_bus_that_is_away_is_said_in_time(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    common = Common.model_validate({"data_dir": tmp_path, "bus": {"address": address}})
    (problem,) = await check.find_problems("gateway", common, None, None, bus=True)
    assert problem.startswith(f"setting bus.address = '{address}': ")


async def test_the_bus_is_left_as_it_is(embedded_bus: str) -> None:
    await topics.check(BusSettings(address=embedded_bus), 20.0)
    with pytest.raises(Unavailable, match=r"setting bus\.address"):
        await topics.check(BusSettings(address="127.0.0.1:1"), 5.0)


async def test_what_a_service_itself_finds_is_added(tmp_path: Path) -> None:
    async def service_check(_common: Common, _settings: object) -> list[str]:
        return ["one is\n  wrong"]

    async def raising(_common: Common, _settings: object) -> list[str]:
        raise SettingError("scorer.functions", "x", "cannot be used")

    common = Common.model_validate({"data_dir": tmp_path})
    assert await check.find_problems("gateway", common, None, service_check, bus=False) == ["one is wrong"]
    assert await check.find_problems("gateway", common, None, raising, bus=False) == [
        "setting scorer.functions = 'x': cannot be used"
    ]


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
    assert [doc.model_copy(update={"value_schema": {}}) for doc in describe(ServiceSection, "own.")] == [
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


class Inner(BaseModel):
    """Section of settings."""

    api_key: str = "sk-very-secret"
    token: SecretStr = SecretStr("also-secret")
    tokens: int = 7


class Outer(BaseModel):
    """Settings with secrets of all kinds."""

    inner: Inner = Inner()
    url: str = "postgresql://me:hunter22@db/name"
    urls: tuple[str, ...] = ("http://me:hunter22@host",)
    rank: int = 8
    nothing: str | None = None


def test_secrets_are_hidden_wherever_they_are() -> None:
    text = json.dumps(public_settings(Outer()))
    assert not [secret for secret in ("very-secret", "also-secret", "hunter22") if secret in text]
    assert public_settings(Outer())["rank"] == 8
    inner = public_settings(Outer())["inner"]
    assert isinstance(inner, dict)
    assert inner["tokens"] == 7


def test_the_page_needs_the_internal_key_where_there_is_one() -> None:
    common = Common(security=SecuritySettings(internal_key=SecretStr("between-us")))
    with TestClient(web.app({}, [settings_route("trainer", Outer(), common)], common)) as http:
        assert http.get("/settings").status_code == 401
        response = http.get("/settings", headers={"Authorization": "Bearer between-us"})
        assert response.json()["service"] == "trainer"
    open_to_all = Common()
    with TestClient(web.app({}, [settings_route("trainer", Outer(), open_to_all)], open_to_all)) as http:
        assert http.get("/settings").json()["settings"]["rank"] == 8


class Colour(Section):
    """Section that packages announce under the entry point `headrace.colours`."""

    depth: int = 3
    """How deep."""


COLOURS: Registry[Colour] = Registry("colours", Colour, "colour")


class Paint(Section):
    """Section of settings to which packages add sections."""

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
from tests.unit.runtime.test_check import Colour
with (Path(__file__).parent / "imported").open("a") as file:
    file.write("x")
RED, GREEN, GREY = Colour(depth=1), Colour(depth=2), "grey"
"""


@pytest.fixture
def paints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a package with two valid entry points, an invalid one, and one that cannot be imported. Return its
    folder."""
    names = {"red": "RED", "green": "GREEN", "grey": "GREY", "gone": "GONE"}
    announces = {"headrace.colours": {name: f"paints:{value}" for name, value in names.items()}}
    packages.install(tmp_path, "the-paints", announces, paints=MODULE)
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
    packages.install(tmp_path, "other", {"headrace.colours": {"red": "paints:RED"}})
    registries._read.cache_clear()
    with pytest.raises(PluginError, match=r"(other|the-paints) 1\.0 and (other|the-paints) 1\.0 both announce"):
        COLOURS.get("red")


def test_of_two_copies_of_a_package_the_first_is_the_one(
    paints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages.install(tmp_path / "later", "the-paints", {"headrace.colours": {"red": "paints:GREEN"}})
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
    assert {"gateway", "broker", "collector", "scorer", "judge", "trainer", "registry", "inference"} <= set(
        installed_services()
    )
    assert all(isinstance(info, ServiceInfo) for info in installed_services().values())
