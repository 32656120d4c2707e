"""A turn belongs to one trajectory of its tenant, and ingested trajectories are checked."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import event

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


async def test_a_trajectory_of_thousands_of_turns_takes_few_statements(database_url: str, data_dir: Path) -> None:
    """A single large run of one caller must not block the scorer and its database for other callers."""
    turn = ask([user("q")])
    branch = closed(turn).branches[0]
    span = branch.spans[0]
    spans = [span.model_copy(update={"start": at, "logprobs": (-0.5,), "turn_id": f"t{at}"}) for at in range(4000)]
    large = branch.model_copy(update={"token_ids": (1,) * 4000, "spans": tuple(spans)})
    statements: list[str] = []
    async with scorer(database_url, data_dir) as rig:
        await rig.deliver(closed(turn, trajectory_id="first"))
        engine = rig.stream.processor.database.engine.sync_engine

        @event.listens_for(engine, "before_cursor_execute")
        def note(_connection: object, _cursor: object, statement: str, *_rest: object) -> None:
            statements.append(statement)

        await rig.deliver(closed(turn, trajectory_id="many", branches=(large,)))
        assert await rig.stream.count("turn_owners") == 4001
        assert len(statements) < 200
        statements.clear()
        overlapping = large.model_copy(update={"spans": (*spans[1:], spans[0].model_copy(update={"start": 4000}))})
        again = overlapping.model_copy(update={"token_ids": (1,) * 4001})
        await rig.deliver(closed(turn, trajectory_id="again", branches=(again,)))
        assert [letter.reason for letter in rig.stream.sent(DeadLetter)] == ["turn_taken"]
        assert len(statements) < 200
