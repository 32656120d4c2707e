"""However much is remembered: no timer and no event reads all of it."""

from __future__ import annotations

from functools import partial

from headrace_collector import upkeep
from headrace_collector.settings import CollectorSettings
from headrace_runtime.clock import epoch_ms
from tests.support.marks import postgres_is_long
from tests.support.query_plans import recorded, scans
from tests.support.remembered import Ages, fill_collector
from tests.support.streams import START, Bench
from tests.support.turns import ask, commit, end, feedback, user
from tests.unit.collector.conftest import Open, pass_time

_TURNS = 20_000
_FEW = 1_000
_PARTIAL = frozenset({"ix_sessions_open", "ix_sessions_over", "ix_sessions_tenant", "ix_turns_kept"})


async def _use(stream: Bench, settings: CollectorSettings) -> None:
    """Every kind of event, and every timer."""
    turn = ask([user("q")])
    await stream.deliver(turn, feedback("s", turn), feedback("elsewhere"))
    await stream.deliver(ask([user("q")], session="other"), feedback("other"), commit())
    await stream.deliver(end())
    await pass_time(stream, 2000)
    for step in (upkeep.close_surplus_sessions, upkeep.delete_old_rows, upkeep.check_feedback_targets):
        await stream.step(partial(step, settings=settings))
    stream.clock.advance(settings.remember_s * 2)
    await stream.processor.prune()


@postgres_is_long()
async def test_queries_never_scan_whole_tables(with_settings: Open) -> None:
    async with with_settings() as stream:
        settings = CollectorSettings()
        ages = Ages(epoch_ms(START), settings.remember_s, old=300, kept=300, open=100)
        await fill_collector(stream.processor.database, _TURNS, ages, lambda _inserted, _total: None)
        with recorded(stream.processor.database) as statements:
            await _use(stream, settings)
        assert len(statements.found) > 20
        async with stream.aborted() as tx:
            assert await scans(tx, statements, partial=_PARTIAL, rows_max=_FEW) == []
