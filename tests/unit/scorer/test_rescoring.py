"""Stored trajectories scored again: as the stream would in the end, in order, byte for byte the same each time."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from headrace_runtime.blobs import BlobStore
from headrace_runtime.clock import epoch_ms
from headrace_runtime.filters import Lines
from headrace_schemas import Event, Experience, Feedback, Reward, Trajectory
from headrace_schemas.replay import ClosedLine, FeedbackLine, ScoredLine
from headrace_scorer.learned.replaying import LearnedReplay
from headrace_scorer.learned.source import LearnedSource
from headrace_scorer.rescoring import Rescoring, _work
from headrace_scorer.settings import ScorerSettings
from tests.support.streams import START
from tests.support.trajectories import closed
from tests.support.turns import ask, user
from tests.unit.scorer.conftest import LocalPool

WORDS = {Trajectory: "trajectory", Reward: "reward"}


def run(name: str, at: float = 10.0, **fields: Any) -> Trajectory:
    return closed(ask([user(name)], session=name), at=at, **fields)


def said(about: Trajectory, value: float | None, at: float = 1.0, *, listed: bool = True, **fields: Any) -> Feedback:
    given = {
        "time": START.replace(microsecond=0).fromtimestamp(START.timestamp() + at, START.tzinfo),
        "feedback_id": f"{about.session_id}-{at}",
        "session_key": about.session_key,
        "value": value,
        "msg_ids": about.turn_ids if listed else (),
    }
    return Feedback.model_validate({**given, **fields})


def judged(about: Trajectory, value: float | None, revision: int = 0, source: str = "judge:good") -> Reward:
    outcome = "abstained" if value is None else "scored"
    return Reward(
        time=START,
        trajectory_id=about.trajectory_id,
        session_key=about.session_key,
        source=source,
        revision=revision,
        outcome=outcome,
        value=value,
    )


def line(event: Event | ClosedLine, place: int) -> tuple[str, bytes]:
    """Feedback was said in the given order."""
    if isinstance(event, Feedback):
        return "feedback", FeedbackLine(event=event.model_dump(mode="json"), place=place).model_dump_json().encode()
    return WORDS.get(type(event), "closed"), event.model_dump_json().encode()


async def scored(
    *events: Event | ClosedLine, functions: Sequence[Callable[..., object]] = (), **settings: Any
) -> tuple[list[Experience], ScoredLine, bytes]:
    lines = [line(one, place) for place, one in enumerate(events)]
    source = io.BytesIO(b"".join(b"%s %s\n" % (word.encode(), value) for word, value in lines))
    target = io.BytesIO()
    wanted = ScorerSettings.model_validate(settings)
    blobs = BlobStore("memory://rescoring")
    await _work(Rescoring(wanted, LocalPool(wanted, functions)), Lines(source, target), blobs)
    *made, last = (line.partition(b" ") for line in target.getvalue().splitlines())
    experiences = [Experience.from_json(value) for word, _, value in made if word == b"experience"]
    return experiences, ScoredLine.model_validate_json(last[2]), target.getvalue()


async def test_functions_feedback_and_judges_make_one_reward() -> None:
    def length(trajectory: Trajectory, context: dict[str, object]) -> float:
        return float(len(trajectory.messages)) + float(context["bonus"])  # type: ignore[arg-type]

    one, two = run("one", context={"bonus": 1}), run("two", context={"bonus": 2}, task_id="t")
    found, report, _ = await scored(
        said(one, 0.0, context={"bonus": 5}),
        judged(one, 1.0),
        judged(one, 4.0, revision=2),
        judged(one, 2.0, revision=1),
        judged(two, 9.0, source="function:length"),
        one,
        two,
        functions=[length],
        weights={"function:*": 2.0, "*": 1.0},
    )
    assert [made.trajectory_id for made in found] == [one.trajectory_id, two.trajectory_id]
    assert found[0].reward == pytest.approx((2 * 7.0 + 0.0 + 4.0) / 4), "the newest revision, and the newest context"
    assert found[1].reward == 4.0, "what a function said before is passed over: it was called again"
    assert found[1].task_id == "t"
    assert report.outcomes == {"function:length": {"scored": 2}}
    assert report.experiences == {"rewarded": 2}


async def test_abstaining_failing_and_missing_are_not_zero() -> None:
    """P6."""

    def picky(trajectory: Trajectory) -> float | None:
        if trajectory.session_id == "fails":
            raise RuntimeError("no")
        return None if trajectory.session_id == "abstains" else 0.0

    runs = [run(name) for name in ("fails", "abstains", "zero")]
    found, report, _ = await scored(*runs, functions=[picky])
    assert [(made.reward, made.no_reward) for made in found] == [(None, "no_reward"), (None, "no_reward"), (0.0, None)]
    assert report.outcomes["function:picky"] == {"abstained": 1, "failed": 1, "scored": 1}


async def test_what_is_not_trained_is_counted() -> None:
    held_out, empty = run("held-out", purpose="eval"), run("empty", branches=(), dialogues=())
    foreign = run("foreign", untrained="registered")
    found, report, _ = await scored(held_out, empty, foreign)
    assert found == []
    assert report.not_trained == {"eval": 1, "nothing_sampled": 1, "registered": 1}
    assert report.trajectories == 3


async def test_feedback_about_a_session_knows_its_trajectories() -> None:
    """It is about what was closed next, also when that is outside the range that is replayed."""
    first, second = run("s", at=10.0), run("s", at=20.0, trajectory_id="second")
    everything = [
        ClosedLine(
            trajectory_id=one.trajectory_id,
            session_key=one.session_key,
            tenant=one.tenant,
            time_ms=epoch_ms(one.time),
            place=place,
        )
        for place, one in enumerate((first, second))
    ]
    word = said(first, 1.0, at=15.0, listed=False)
    found, _, _ = await scored(*everything, word, first)
    assert found[0].no_reward == "no_reward", "it meant the second one"
    found, _, _ = await scored(*everything, word, second)
    assert found[0].reward == 1.0
    withdrawn = said(first, None, at=16.0, listed=False, withdrawn=True)
    found, _, _ = await scored(*everything, word, withdrawn, second)
    assert found[0].reward is None


async def test_p9_the_same_input_gives_the_same_bytes() -> None:
    events: list[Event] = []
    for number in range(40):
        one = run(f"r{number}", at=float(number))
        events += [said(one, number % 3), judged(one, 0.5)]
    events += [run(f"r{number}", at=float(number)) for number in range(40)]
    first = await scored(*events)
    again = await scored(*events)
    assert first[2] == again[2]
    assert len(first[0]) == 40


async def test_a_large_experience_is_stored_only_when_that_is_allowed() -> None:
    big = run("big", branches=(closed().branches[0].model_copy(update={"token_ids": (7,) * 90_000}),))
    found, _, _ = await scored(said(big, 1.0), big)
    assert len(found) == 1
    source = io.BytesIO(b"store {}\nfeedback %s\ntrajectory %s\n" % (line(said(big, 1.0), 0)[1], big.to_json()))
    target, blobs, wanted = io.BytesIO(), BlobStore("memory://rescoring-large"), ScorerSettings()
    await _work(Rescoring(wanted, LocalPool(wanted, ())), Lines(source, target), blobs)
    assert target.getvalue().startswith(b"stored {")
    assert len(list(blobs.digests())) == 1


async def test_a_trajectory_that_is_none_is_counted_and_the_rest_goes_on() -> None:
    source = io.BytesIO(b"trajectory {poison\ntrajectory %s\n" % run("fine").to_json())
    target, wanted = io.BytesIO(), ScorerSettings()
    await _work(Rescoring(wanted, LocalPool(wanted, ())), Lines(source, target), BlobStore("memory://rescoring-bad"))
    report = ScoredLine.model_validate_json(target.getvalue().splitlines()[-1].partition(b" ")[2])
    assert report.not_trained == {"unreadable": 1}
    assert report.experiences == {"no_reward": 1}


def quality(trajectory: Trajectory) -> float:
    return 0.8 if int(trajectory.session_id) % 2 == 0 else 0.2


def thumbed(runs: Sequence[Trajectory]) -> list[Feedback]:
    return [said(one, float(int(one.session_id) % 2 == 0), at=float(at)) for at, one in enumerate(runs)]


async def test_a_reward_model_learns_from_all_and_speaks_of_all() -> None:
    """What it said in the stream is passed over. The same lines give the same bytes."""
    runs = [run(str(number)) for number in range(40)]
    thumbs = thumbed(runs[:30])
    before = judged(runs[35], 1.0, source="learned:thumbs")
    learned = {"model": "thumbs", "thumbs_min": 20}
    settings: dict[str, Any] = {"learned": learned, "weights": {"function:*": 0.0, "*": 1.0}}
    made, report, first = await scored(*thumbs, before, *runs, functions=[quality], **settings)
    _, _, again = await scored(*thumbs, before, *runs, functions=[quality], **settings)
    assert first == again
    assert [one.trajectory_id for one in made] == [one.trajectory_id for one in runs]
    for one, about in zip(made[30:], runs[30:], strict=True):
        assert one.reward is not None
        assert (one.reward > 0.6) if int(about.session_id) % 2 == 0 else (one.reward < 0.4)
    assert report.outcomes["learned:thumbs"] == {"scored": 40}


async def test_a_reward_model_goes_on_with_what_it_knew_and_speaks_of_what_is_new() -> None:
    runs = [run(str(number)) for number in range(40)]
    learned = {"model": "thumbs", "thumbs_min": 20}
    settings = ScorerSettings.model_validate({"learned": learned, "weights": {"function:*": 0.0, "*": 1.0}})
    pool = LocalPool(settings, [quality])
    learning = LearnedReplay(LearnedSource(settings.learned, lambda: pool.functions))
    made = []
    for part in (runs[:30], runs[30:]):
        rescoring = Rescoring(settings, pool, learning)
        for place, thumb in enumerate(thumbed(part) if part[0] is runs[0] else []):
            rescoring.add_line(*line(thumb, place))
        for one in part:
            rescoring.accept(await rescoring.score(one.to_json()))
        made.append([experience async for experience in rescoring.learned()])
    assert [one.trajectory_id for one in made[1]] == [one.trajectory_id for one in runs[30:]]
    assert all((one.reward or 0.0) > 0.6 for one in made[1][::2])
    assert all(0.0 < (one.reward or 0.0) < 0.4 for one in made[1][1::2])
