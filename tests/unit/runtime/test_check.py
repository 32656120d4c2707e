"""Start check of the parts that all services share."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace_runtime import check
from headrace_runtime.errors import SettingError, Unavailable
from headrace_runtime.kafka import topics
from headrace_runtime.settings.sections import BusSettings, Common
from tests.support.ports import free_port


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
