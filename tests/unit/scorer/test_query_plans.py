"""However much is remembered: no timer and no event reads all of it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from headrace_runtime.clock import epoch_ms
from headrace_scorer import upkeep
from headrace_scorer.settings import ScorerSettings
from tests.support.marks import postgres_is_long
from tests.support.query_plans import recorded, scans
from tests.support.remembered import Ages, fill_scorer
from tests.support.streams import START
from tests.support.trajectories import closed
from tests.support.turns import ask, feedback, user
from tests.unit.scorer.conftest import Rig, rematch_of, scorer

_TURNS = 20_000
_FEW = 1_000


def length(trajectory: object) -> float:
    return 0.5


async def _use(rig: Rig, settings: ScorerSettings) -> None:
    """Every kind of event, and every timer."""
    turn = ask([user("q")])
    await rig.deliver(closed(turn, task_id="t"), feedback("s", turn), feedback("s"))
    await rig.deliver(closed(ask([user("q")], session="other"), session="other"))
    await rig.deliver(feedback("any", level="task", task_id="t", partition=0))
    await rig.stream.step(rematch_of(rig))
    await rig.pass_time(settings.reward_wait_s + 1)
    await rig.scoring.take_over(rig.stream.processor)
    await rig.stream.step(upkeep.measure)
    for forget in upkeep.FORGETTING:
        await rig.stream.step(partial(forget, retention_s=settings.retention_s))
    rig.stream.clock.advance(settings.retention_s * 2)
    await rig.stream.processor.prune()


@postgres_is_long()
async def test_nothing_reads_all_that_is_remembered(database_url: str, data_dir: Path) -> None:
    async with scorer(database_url, data_dir, length) as rig:
        settings = ScorerSettings()
        database = rig.stream.processor.database
        ages = Ages(epoch_ms(START), settings.retention_s, old=300, kept=0, open=100)
        await fill_scorer(database, _TURNS, ages, lambda _done, _total: None)
        with recorded(database) as statements:
            await _use(rig, settings)
        assert len(statements.found) > 20
        async with rig.stream.aborted() as tx:
            assert await scans(tx, statements, partial=frozenset({"ix_trajectories_rematch"}), rows_max=_FEW) == []
