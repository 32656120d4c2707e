"""Tests of the page of rewards."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest

from headrace_console.flow_rules import RewardRules
from headrace_console.read_model import reward_queries
from headrace_console.read_model.side_rows import bucket_of
from headrace_runtime.settings.sections import DatabaseSettings
from headrace_schemas import Reward
from headrace_schemas.values.ids import response_id, session_key
from tests.support.account_events import START, turn
from tests.unit.console.support import Stand
from tests.unit.console.test_sessions import KEY, apply, session_events


@pytest.fixture
async def stand(tmp_path: Path, database_url: str) -> AsyncIterator[Stand]:
    """Return a console on each database."""
    async with Stand(tmp_path, database=DatabaseSettings(url=database_url)) as opened:
        yield opened


async def test_rewards_page_counts_each_outcome_in_its_own_column(stand: Stand) -> None:
    stand.clock.now = lambda: START + timedelta(hours=1)  # type: ignore[method-assign]
    await apply(stand, [*session_events(), *session_events()[3:6]])
    client = await stand.signed_in()
    page = (await client.get("/rewards")).text
    rows = dict(re.findall(r'<tr><th scope="row">([^<]+)</th>((?:<td class="number">[0-9,.]*</td>)+)</tr>', page))
    numbers = {source: re.findall(r">([0-9,.]*)</td>", cells) for source, cells in rows.items()}
    first = ["1", "0.400"]
    assert numbers["concise"] == [*first, "1", "0", "0", "0", "0", "0"], "weight 1; two revisions are one reward"
    assert numbers["judge:help"] == ["1", "", "0", "1", "0", "0", "0", "0"]
    assert "without evaluation sessions, no two sources of a weight above 0 have scored 30 turns or runs" in page
    assert "No source failed in the last 7 days." in page
    assert "</meter> 100 %" in page
    assert "0.4 to 0.5" in page
    assert (await client.get("/rewards?days=0")).status_code == 400


@pytest.mark.parametrize(
    ("unweighted", "sources"), [("", "concise and judge:help"), ("judge:help", "concise and correct")]
)
async def test_rewards_page_names_the_two_weighted_sources_that_disagree_most(
    stand: Stand, monkeypatch: pytest.MonkeyPatch, unweighted: str, sources: str
) -> None:
    monkeypatch.setattr(RewardRules, "weight", lambda _rules, source: float(source != unweighted))
    stand.clock.now = lambda: START + timedelta(hours=1)  # type: ignore[method-assign]
    scores: dict[str, list[float]] = {
        "concise": [at % 2 for at in range(40)],
        "correct": [0.9 * (at % 2) if at % 8 else 0.5 for at in range(40)],
        "judge:help": [at % 3 / 2 for at in range(40)],
        "rare": [1 - at % 2 for at in range(29)],
        "judge:wide": [7 - at for at in range(40)],
    }
    rewards = [
        Reward(time=START, trajectory_id=f"R{run}", session_key=KEY, source=source, value=value)
        for source, values in scores.items()
        for run, value in enumerate(values)
    ]
    await apply(stand, [*session_events()[:1], *rewards])
    page = " ".join((await (await stand.signed_in()).get("/rewards")).text.split())
    sentence = re.search(rf"<p>({sources} about m: .*?)</p>", page)
    assert sentence is not None, page
    if unweighted:
        return
    assert "32 % of 40 turns or runs that both scored have the same score from both." in sentence[1]
    assert re.search(r"beyond chance: -?0\.[0-9]{3} \(95 %: -0\.[0-9]{3} to 0\.[0-9]{3}\)", sentence[1]), sentence[1]


async def test_disagreement_is_that_of_sessions_with_rewards(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    stand.clock.now = lambda: START + timedelta(hours=2)  # type: ignore[method-assign]
    monkeypatch.setattr(reward_queries, "SESSIONS_MAX", 1)
    rewards = [
        Reward(time=START, trajectory_id=f"R{run}", session_key=KEY, source=source, value=(run + shift) % 2)
        for shift, source in enumerate(("concise", "correct"))
        for run in range(30)
    ]
    keys = [session_key("default", f"open{number}") for number in range(4)]
    later = [turn(response_id(key), session_key=key, time=START + timedelta(hours=1)) for key in keys]
    evaluations = [call.model_copy(update={"purpose": "eval"}) for call in later[:2]]
    scored = [
        Reward(time=START, trajectory_id=f"X{at}", session_key=key, source="concise", value=1.0)
        for at, key in enumerate(keys[:2])
    ]
    await apply(stand, [*session_events()[:1], *rewards, *evaluations, *later[2:], *scored])
    page = (await (await stand.signed_in()).get("/rewards")).text
    assert "concise and correct about m: 0 % of 30 turns or runs" in " ".join(page.split())


@pytest.mark.parametrize(
    ("value", "bucket"),
    [(None, -100), (-5.0, -11), (-1.0, -10), (-0.05, -1), (0.0, 0), (0.99, 9), (1.0, 10), (7.0, 10)],
)
def test_bucket_is_the_tenth_of_a_value(value: float | None, bucket: int) -> None:
    assert bucket_of(value) == bucket
