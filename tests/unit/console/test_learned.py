"""Tests of the page of rewards, of advantages on the pages of answers, and of what a version learned from."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from headrace_console.flow_rules import RewardRules
from headrace_console.read_model import reward_queries
from headrace_console.read_model.side_rows import bucket_of
from headrace_console.sources.clients import RegistryReader
from headrace_runtime.settings.sections import DatabaseSettings
from headrace_schemas import Event, Feedback, Message, Reward, TrainingMetrics, TrainingOutcome
from headrace_schemas.events.checkpoint import TurnAdvantage
from headrace_schemas.http.registry_api import VersionState
from headrace_schemas.values.ids import response_id, session_key
from tests.support.turns import START, experience, report, restores, trajectory, turn, undoes
from tests.unit.console.support import Stand
from tests.unit.console.test_sessions import HOSTILE, KEY, TURN_ID, apply, session_events

FIRST, SECOND, UNTRAINED = "m@00000000000000aa", "m@00000000000000bb", "m@10000000000000cc"


@pytest.fixture
async def stand_with_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stand]:
    """Yield a console whose registry has three versions."""

    async def versions(_registry: RegistryReader, _model: str) -> tuple[VersionState, ...]:
        names = (FIRST, SECOND, UNTRAINED)
        more: dict[str, Any] = {"model": "m", "lineage": "main", "state": "registered", "registered_at": START}
        return tuple(VersionState(id=name, step=step, **more) for step, name in enumerate(names))

    monkeypatch.setattr(RegistryReader, "versions", versions)
    async with Stand(tmp_path, tenants=("default",)) as opened:
        yield opened


class Session:
    """Events of a session with `turns` turns and one experience that has the name of the session."""

    def __init__(self, name: str, turns: int = 1, tenant: str = "default") -> None:
        self.name, self.key = name, session_key(tenant, name)
        self.turn_ids = tuple(response_id(self.key) for _ in range(turns))
        more: dict[str, Any] = {"session_key": self.key, "session_id": name, "tenant": tenant}
        run = trajectory(f"T-{name}", self.turn_ids, session_key=self.key, session_id=name, tenant=tenant)
        trained = experience(name, *self.turn_ids, of=f"T-{name}", reward=0.5)
        owner = {"session_key": self.key, "tenant": tenant}
        self.events: list[Event] = [turn(turn_id, **more) for turn_id in self.turn_ids]
        self.events += [run, trained.model_copy(update=owner)]

    def outcome(self, advantage: float | None, *by_turn: TurnAdvantage, revision: int = 0) -> TrainingOutcome:
        return TrainingOutcome(
            experience_id=self.name,
            revision=revision,
            turn_ids=self.turn_ids,
            advantage=advantage,
            turn_advantages=by_turn,
        )


def saved(version: str | None, save: int, *outcomes: TrainingOutcome) -> TrainingMetrics:
    return report(*outcomes, save=save, at_s=save).model_copy(update={"version": version})


async def test_session_page_shows_which_answers_training_pushed_and_where(stand_with_versions: Stand) -> None:
    session = Session("a", 3)
    first, second, third = session.turn_ids
    by_turn = (TurnAdvantage(turn_id=first, advantage=0.75), TurnAdvantage(turn_id=second, advantage=-0.25))
    left_out = session.outcome(0.25, revision=1).model_copy(update={"left_out": (third,)})
    await apply(
        stand_with_versions,
        [*session.events, saved(FIRST, 3, session.outcome(0.5, *by_turn)), saved(None, 4, left_out)],
    )
    page = (await (await stand_with_versions.signed_in()).get(f"/s/{session.key}")).text
    link = f'<a href="/models/m/{FIRST[2:]}">{FIRST[:14]}</a>'
    assert f"trained: pushed up, advantage +0.5 (step 3 of lineage main), first in {link}" in page
    turns = dict(zip(session.turn_ids, page.split('class="turn"')[1:], strict=True))
    pushed = {name: re.findall(r"This answer was pushed [^<]*", text) for name, text in turns.items()}
    where = f"by step 3 of lineage main, first in {FIRST}."
    again = (
        "This answer was pushed up, advantage +0.25, by training after step 4 of lineage main, in no saved version yet."
    )
    assert pushed == {
        first: [f"This answer was pushed up, advantage +0.75, {where}", again],
        second: [f"This answer was pushed down, advantage -0.25, {where}", again],
        third: [],
    }


async def test_session_page_says_of_undone_training_that_it_was_undone(stand_with_versions: Stand) -> None:
    session = Session("a")
    events = [*session.events, saved(FIRST, 0, session.outcome(0.5)), undoes("a", save=1)]
    client = await stand_with_versions.signed_in()
    for more, count in (([], 1), ([restores("a", save=2)], 0)):
        await apply(stand_with_versions, [*events, *more])
        page = (await client.get(f"/s/{session.key}")).text
        assert page.count("; this was undone.") == count


async def test_session_page_names_the_training_of_an_edit(stand_with_versions: Stand) -> None:
    session = Session("a")
    edit = TurnAdvantage(turn_id=session.turn_ids[0], advantage=1.0, edited=True)
    await apply(stand_with_versions, [*session.events, saved(FIRST, 0, session.outcome(None, edit))])
    page = (await (await stand_with_versions.signed_in()).get(f"/s/{session.key}")).text
    assert "An edit of this answer was pushed up, advantage +1, by step 0" in page
    assert "This answer was pushed" not in page


async def test_session_page_names_the_version_that_contains_a_save_between_versions(stand_with_versions: Stand) -> None:
    session = Session("a")
    await apply(
        stand_with_versions, [*session.events, saved(FIRST, 1), saved(None, 2, session.outcome(0.5)), saved(SECOND, 3)]
    )
    client = await stand_with_versions.signed_in()
    page = (await client.get(f"/s/{session.key}")).text
    link = f'<a href="/models/m/{SECOND[2:]}">{SECOND[:14]}</a>'
    assert f"trained: pushed up, advantage +0.5 (step 3 of lineage main), first in {link}" in page
    assert f"by step 3 of lineage main, first in {SECOND}." in page
    assert await learned_rows(stand_with_versions, SECOND) == [(session.key, "+0.500", "up")], (
        "the version's own page agrees"
    )


async def test_runs_of_one_session_are_told_apart(stand_with_versions: Stand) -> None:
    first, second = Session("a"), Session("a")
    rename = {"experience_id": "b", "trajectory_id": "T-b"}
    run, trained = (event.model_copy(update=rename) for event in second.events[1:])
    second.name = "b"
    events = [*first.events, second.events[0], run, trained]
    await apply(stand_with_versions, [*events, saved(FIRST, 0, first.outcome(0.5), second.outcome(-0.5))])
    page = (await (await stand_with_versions.signed_in()).get(f"/s/{first.key}")).text
    assert "2 turns in 2 runs" in page
    turns = page.split('class="turn')[1:]
    assert [re.findall("Run [0-9]", text) for text in turns] == [["Run 1"], ["Run 2"]]
    experiences = re.findall(r'<a href="#t-([0-9]+)">Run ([0-9])</a>, experience <code>([ab])</code>', page)
    assert [entry[1:] for entry in experiences] == [("1", "a"), ("2", "b")]
    assert all(f'id="t-{turn}"' in page for turn, *_ in experiences)
    page = (await (await stand_with_versions.signed_in()).get("/models/m/00000000000000aa/learned")).text
    assert re.findall(r'#t-([0-9]+)">.*?<td class="number">([0-9])</td>', page) == [entry[:2] for entry in experiences]


async def learned_rows(stand_with_versions: Stand, version: str, query: str = "") -> list[tuple[str, str, str]]:
    page = (
        await (await stand_with_versions.signed_in()).get(f"/models/m/{version.partition('@')[2]}/learned{query}")
    ).text
    rows = re.findall(r'<tr><th scope="row"><a href="/s/([a-z2-7]{16})#t-[0-9]+">.*?</tr>', page)
    cells = re.findall(r'<td class="number">([-+.0-9]*)</td><td>([^<]*)</td></tr>', page)
    return [(key, *cell) for key, cell in zip(rows, cells, strict=True)]


async def test_version_page_lists_what_was_trained_since_the_version_before_it(stand_with_versions: Stand) -> None:
    sessions = [Session(name) for name in "abcde"]
    foreign = Session("f", tenant="other")
    values = dict(zip("abcde", (0.5, -1.0, 0.0, None, 0.75), strict=True))
    a, b, c, d, e = (session.outcome(values[session.name]) for session in sessions)
    await apply(
        stand_with_versions,
        [
            *(event for session in (*sessions, foreign) for event in session.events),
            saved(FIRST, 0, a),
            saved(None, 1, b, c),
            saved(SECOND, 2, d, e, foreign.outcome(2.0)),
            undoes("c", save=3),
            saved(None, 4, sessions[0].outcome(3.0, revision=1)),
        ],
    )
    keys = {session.name: session.key for session in sessions}
    assert await learned_rows(stand_with_versions, FIRST) == [(keys["a"], "+0.500", "up")]
    expected = [
        (keys["e"], "+0.750", "up"),
        (keys["c"], "+0.000", "unchanged, undone since"),
        (keys["b"], "-1.000", "down"),
        (keys["d"], "", "not reported"),
    ]
    assert await learned_rows(stand_with_versions, SECOND) == expected, "neither another version's nor another tenant's"
    assert await learned_rows(stand_with_versions, SECOND, "?first=down") == [*expected[2::-1], expected[3]]
    client = await stand_with_versions.signed_in()
    page = (await client.get("/models/m/00000000000000bb/learned")).text
    assert "4 revisions of experiences, 1 pushed up, 1 pushed down, 1 with advantage 0, 1 without" in page
    assert (await client.get("/models/m/00000000000000bb/learned?first=most")).status_code == 400
    assert "No training of this version was read" in (await client.get("/models/m/10/learned")).text, "cut"
    for digest in ("00000000000000dd", "0"):
        assert (await client.get(f"/models/m/{digest}/learned")).status_code == 404, "none, or several"


async def test_version_page_shows_hostile_titles_as_text(stand_with_versions: Stand) -> None:
    session = Session("a")
    first = session.events[0].model_copy(update={"session_id": HOSTILE})
    await apply(stand_with_versions, [first, *session.events[1:], saved(FIRST, 0, session.outcome(0.5))], titles=False)
    page = (await (await stand_with_versions.signed_in()).get("/models/m/00000000000000aa/learned")).text
    assert "<script>alert" not in page
    assert "\u202e" not in page


async def test_version_page_needs_the_role_viewer(stand_with_versions: Stand) -> None:
    rater = await stand_with_versions.signed_in("rater")
    assert (await rater.get("/models/m/00000000000000aa/learned")).status_code == 403


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
    other_pairs = re.findall(r'<th scope="row">([a-z:]+ and [a-z:]+)</th>', page)
    assert set(other_pairs) == {"correct and judge:help", "concise and correct"}
    assert "32 % of 40 turns or runs that both scored have the same score from both." in sentence[1]
    assert re.search(r"beyond chance: -?0\.[0-9]{3} \(95 %: -0\.[0-9]{3} to 0\.[0-9]{3}\)", sentence[1]), sentence[1]


async def test_edited_sessions_are_listed_with_the_number_of_their_edits(stand: Stand) -> None:
    content = Message(role="assistant", content="Ada.")
    edits = [
        Feedback(time=START, feedback_id=f"e{at}", session_key=KEY, msg_ids=(TURN_ID,), edit=content, rater=rater)
        for at, rater in enumerate(("ann", "bob"))
    ]
    await apply(stand, [*session_events(), *edits])
    stand.clock.now = lambda: START + timedelta(hours=1)  # type: ignore[method-assign]
    client = await stand.signed_in()
    page = (await client.get("/sessions?edited=yes")).text
    assert f'href="/s/{KEY}"' in page
    assert "2 edits" in page
    rewards = (await client.get("/rewards")).text
    assert '<a href="/sessions?edited=yes&amp;tenant=default">1 session of these days</a>' in rewards


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
