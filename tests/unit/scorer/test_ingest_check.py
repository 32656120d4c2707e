"""A turn belongs to one trajectory of its tenant, whoever sends it; what comes from outside is checked."""

from __future__ import annotations

from pathlib import Path

from headrace_schemas import DeadLetter
from tests.support.trajectories import closed
from tests.support.turns import ask, user
from tests.unit.scorer.conftest import scorer


async def test_a_turn_is_in_one_trajectory_only(database_url: str, data_dir: Path) -> None:
    async with scorer(database_url, data_dir) as rig:
        turn = ask([user("q")])
        first = closed(turn)
        await rig.deliver(first)
        await rig.deliver(*(closed(turn, trajectory_id=f"again-{n}") for n in range(3)), first)
        assert [letter.reason for letter in rig.stream.sent(DeadLetter)] == ["turn_taken"] * 3
        assert await rig.stream.count("trajectories") == 1
        assert await rig.stream.count("turn_owners") == 1


async def test_another_tenants_turn_of_the_same_id_is_its_own(database_url: str, data_dir: Path) -> None:
    async with scorer(database_url, data_dir) as rig:
        turn = ask([user("q")], turn_id="mine-1")
        await rig.deliver(closed(turn, trajectory_id="a"), closed(turn, trajectory_id="b", tenant="other"))
        assert rig.stream.sent(DeadLetter) == []


async def test_what_a_stranger_sends_is_checked(database_url: str, data_dir: Path) -> None:
    async with scorer(database_url, data_dir) as rig:
        record = rig.stream.append("trajectories", closed(ask([user("q")])).to_json())
        await rig.stream.deliver(record)
        assert [letter.reason for letter in rig.stream.sent(DeadLetter)] == ["foreign_end_reason"]
