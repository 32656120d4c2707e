"""The migrations preserve rows that were stored before them."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
from alembic import command
from sqlalchemy import text

from headrace_runtime.settings.sections import Common
from headrace_runtime.storage import migrations
from headrace_runtime.storage.database import Database
from headrace_scorer import ledger
from headrace_scorer.feedback_entries import EntryKey


async def test_the_ledger_of_before_has_its_rewards(
    data_dir: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = Common.model_validate({"data_dir": data_dir, "database": {"url": database_url}})
    database = Database.open(f"t{uuid.uuid4().hex[:12]}", common)
    real = command.upgrade
    try:
        with monkeypatch.context() as patched:
            patched.setattr(command, "upgrade", lambda config, _: real(config, "0004"))
            await migrations.upgrade(database, "headrace_scorer")
        columns = "trajectory_id, tenant, turn_id, source, revision, outcome, value, time_ms, arrived_ms"
        async with database.transaction() as tx:
            for turn, revision, value in (("", 0, 0.25), ("", 1, 0.5), ("a", 0, 1.0)):
                parameters = {"turn": turn, "revision": revision, "value": value}
                values = " VALUES ('t', 'default', :turn, 'feedback', :revision, 'scored', :value, 1, 1)"
                await tx.execute(text(f"INSERT INTO ledger ({columns}){values}"), parameters)
        await migrations.upgrade(database, "headrace_scorer")
        async with database.transaction() as tx:
            entries = (await ledger.read(tx, {"t": "default"}))["t"]
            assert await tx.scalar(text("SELECT count(*) FROM ledger")) == 3
        current_values = {(reward.source, reward.turn_id, reward.choice): reward.value for reward in entries.current()}
        assert current_values == {("feedback", None, None): 0.5, ("feedback", "a", None): 1.0}
        assert entries.next_revision(EntryKey.reward("feedback")) == 2
    finally:
        if database.schema:
            async with database.transaction() as tx:
                await tx.execute(text(f'DROP SCHEMA "{database.schema}" CASCADE'))
        await database.close()
