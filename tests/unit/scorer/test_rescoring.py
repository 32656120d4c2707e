"""Tests of the rescoring of stored trajectories, and of the judge alarm.

The final result of the stream is computed again, in order, and reproducible byte by byte. The alarm's bound and bets
are compared with their exact definition, and simulated over a long time.
"""

from __future__ import annotations

import io
import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from headrace_runtime.clock import epoch_ms
from headrace_runtime.process.programs import Lines
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import Event, Experience, Feedback, Reward, Trajectory
from headrace_schemas.programs import ClosedLine, FeedbackLine, ScoredLine
from headrace_scorer.judge_monitor import Agreement, upper_bound
from headrace_scorer.learned.refitting import LearnedReplay, LearnedSource
from headrace_scorer.replay import Rescoring, _work
from headrace_scorer.settings import ScorerSettings
from tests.support.turns import START, ask, closed, user
from tests.unit.scorer.conftest import LocalPool

WORDS = {Trajectory: "trajectory", Reward: "reward"}


def run(name: str, at: float = 10.0, **fields: Any) -> Trajectory:
    return closed(ask([user(name)], session=name), at=at, **fields)


def feedback_about(
    about: Trajectory, value: float | None, at: float = 1.0, *, listed: bool = True, **fields: Any
) -> Feedback:
    columns = {
        "time": START.replace(microsecond=0).fromtimestamp(START.timestamp() + at, START.tzinfo),
        "feedback_id": f"{about.session_id}-{at}",
        "session_key": about.session_key,
        "value": value,
        "msg_ids": about.turn_ids if listed else (),
    }
    return Feedback.model_validate({**columns, **fields})


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


def line(event: Event | ClosedLine, offset: int) -> tuple[str, bytes]:
    """Return a line of the filter. Feedback has the offset `offset`."""
    if isinstance(event, Feedback):
        return "feedback", FeedbackLine(event=event.model_dump(mode="json"), place=offset).model_dump_json().encode()
    return WORDS.get(type(event), "closed"), event.model_dump_json().encode()


async def scored(
    *events: Event | ClosedLine, functions: Sequence[Callable[..., object]] = (), **settings: Any
) -> tuple[list[Experience], ScoredLine, bytes]:
    lines = [line(event, index) for index, event in enumerate(events)]
    source = io.BytesIO(b"".join(b"%s %s\n" % (word.encode(), value) for word, value in lines))
    target = io.BytesIO()
    settings_model = ScorerSettings.model_validate(settings)
    blobs = BlobStore("memory://rescoring")
    await _work(Rescoring(settings_model, LocalPool(settings_model, functions)), Lines(source, target), blobs)
    *output, last = (line.partition(b" ") for line in target.getvalue().splitlines())
    experiences = [Experience.from_json(value) for word, _, value in output if word == b"experience"]
    return experiences, ScoredLine.model_validate_json(last[2]), target.getvalue()


async def test_functions_feedback_and_judges_make_one_reward() -> None:
    def length(trajectory: Trajectory, context: dict[str, object]) -> float:
        return float(len(trajectory.messages)) + float(context["bonus"])  # type: ignore[arg-type]

    first, second = run("one", context={"bonus": 1}), run("two", context={"bonus": 2}, task_id="t")
    experiences, report, _ = await scored(
        feedback_about(first, 0.0, context={"bonus": 5}),
        judged(first, 1.0),
        judged(first, 4.0, revision=2),
        judged(first, 2.0, revision=1),
        judged(second, 9.0, source="function:length"),
        first,
        second,
        functions=[length],
        weights={"function:*": 2.0, "*": 1.0},
    )
    assert [experiences.trajectory_id for experiences in experiences] == [first.trajectory_id, second.trajectory_id]
    assert experiences[0].reward == pytest.approx((2 * 7.0 + 0.0 + 4.0) / 4), (
        "the newest revision, and the newest context"
    )
    assert experiences[1].reward == 4.0, "what a function said before is passed over: it was called again"
    assert experiences[1].task_id == "t"
    assert report.outcomes == {"function:length": {"scored": 2}}
    assert report.experiences == {"rewarded": 2}


async def test_abstaining_failing_and_missing_are_not_zero() -> None:
    """P6: missing, failed and abstained rewards are not zero."""

    def picky(trajectory: Trajectory) -> float | None:
        if trajectory.session_id == "fails":
            raise RuntimeError("no")
        return None if trajectory.session_id == "abstains" else 0.0

    runs = [run(name) for name in ("fails", "abstains", "zero")]
    experiences, report, _ = await scored(*runs, functions=[picky])
    assert [(experiences.reward, experiences.no_reward) for experiences in experiences] == [
        (None, "no_reward"),
        (None, "no_reward"),
        (0.0, None),
    ]
    assert report.outcomes["function:picky"] == {"abstained": 1, "failed": 1, "scored": 1}


async def test_what_is_not_trained_is_counted() -> None:
    held_out, empty = run("held-out", purpose="eval"), run("empty", branches=(), dialogues=())
    foreign = run("foreign", untrained="registered")
    experiences, report, _ = await scored(held_out, empty, foreign)
    assert experiences == []
    assert report.not_trained == {"eval": 1, "nothing_sampled": 1, "registered": 1}
    assert report.trajectories == 3


async def test_feedback_about_a_session_knows_its_trajectories() -> None:
    """The feedback applies to the next closed trajectory of the session, even outside the replayed range."""
    first, second = run("s", at=10.0), run("s", at=20.0, trajectory_id="second")
    everything = [
        ClosedLine(
            trajectory_id=trajectory.trajectory_id,
            session_key=trajectory.session_key,
            tenant=trajectory.tenant,
            time_ms=epoch_ms(trajectory.time),
            place=index,
        )
        for index, trajectory in enumerate((first, second))
    ]
    word = feedback_about(first, 1.0, at=15.0, listed=False)
    experiences, _, _ = await scored(*everything, word, first)
    assert experiences[0].no_reward == "no_reward", "it meant the second one"
    experiences, _, _ = await scored(*everything, word, second)
    assert experiences[0].reward == 1.0
    withdrawn = feedback_about(first, None, at=16.0, listed=False, withdrawn=True)
    experiences, _, _ = await scored(*everything, word, withdrawn, second)
    assert experiences[0].reward is None


async def test_p9_the_same_input_gives_the_same_bytes() -> None:
    events: list[Event] = []
    for number in range(40):
        trajectory = run(f"r{number}", at=float(number))
        events += [feedback_about(trajectory, number % 3), judged(trajectory, 0.5)]
    events += [run(f"r{number}", at=float(number)) for number in range(40)]
    first = await scored(*events)
    again = await scored(*events)
    assert first[2] == again[2]
    assert len(first[0]) == 40


async def test_a_large_experience_is_stored_only_when_that_is_allowed() -> None:
    big = run("big", branches=(closed().branches[0].model_copy(update={"token_ids": (7,) * 90_000}),))
    experiences, _, _ = await scored(feedback_about(big, 1.0), big)
    assert len(experiences) == 1
    source = io.BytesIO(
        b"store {}\nfeedback %s\ntrajectory %s\n" % (line(feedback_about(big, 1.0), 0)[1], big.to_json())
    )
    target, blobs, settings_model = io.BytesIO(), BlobStore("memory://rescoring-large"), ScorerSettings()
    await _work(Rescoring(settings_model, LocalPool(settings_model, ())), Lines(source, target), blobs)
    assert target.getvalue().startswith(b"stored {")
    assert len(list(blobs.digests())) == 1


async def test_a_trajectory_that_is_none_is_counted_and_the_rest_goes_on() -> None:
    source = io.BytesIO(b"trajectory {poison\ntrajectory %s\n" % run("fine").to_json())
    target, settings_model = io.BytesIO(), ScorerSettings()
    await _work(
        Rescoring(settings_model, LocalPool(settings_model, ())),
        Lines(source, target),
        BlobStore("memory://rescoring-bad"),
    )
    report = ScoredLine.model_validate_json(target.getvalue().splitlines()[-1].partition(b" ")[2])
    assert report.not_trained == {"unreadable": 1}
    assert report.experiences == {"no_reward": 1}


def quality(trajectory: Trajectory) -> float:
    return 0.8 if int(trajectory.session_id) % 2 == 0 else 0.2


def thumbed(runs: Sequence[Trajectory]) -> list[Feedback]:
    return [feedback_about(run, float(int(run.session_id) % 2 == 0), at=float(at)) for at, run in enumerate(runs)]


async def test_a_reward_model_learns_from_all_and_speaks_of_all() -> None:
    """Learned rewards in the stream are ignored, and equal input lines give equal bytes."""
    runs = [run(str(number)) for number in range(40)]
    thumbs = thumbed(runs[:30])
    before = judged(runs[35], 1.0, source="learned:thumbs")
    learned = {"model": "thumbs", "thumbs_min": 20}
    settings: dict[str, Any] = {"learned": learned, "weights": {"function:*": 0.0, "*": 1.0}}
    experiences, report, first = await scored(*thumbs, before, *runs, functions=[quality], **settings)
    _, _, again = await scored(*thumbs, before, *runs, functions=[quality], **settings)
    assert first == again
    assert [item.trajectory_id for item in experiences] == [item.trajectory_id for item in runs]
    for item, about in zip(experiences[30:], runs[30:], strict=True):
        assert item.reward is not None
        assert (item.reward > 0.6) if int(about.session_id) % 2 == 0 else (item.reward < 0.4)
    assert report.outcomes["learned:thumbs"] == {"scored": 40}


async def test_a_reward_model_goes_on_with_what_it_knew_and_speaks_of_what_is_new() -> None:
    runs = [run(str(number)) for number in range(40)]
    learned = {"model": "thumbs", "thumbs_min": 20}
    settings = ScorerSettings.model_validate({"learned": learned, "weights": {"function:*": 0.0, "*": 1.0}})
    pool = LocalPool(settings, [quality])
    learning = LearnedReplay(LearnedSource(settings.learned, lambda: pool.functions))
    results = []
    for part in (runs[:30], runs[30:]):
        rescoring = Rescoring(settings, pool, learning)
        for index, thumb in enumerate(thumbed(part) if part[0] is runs[0] else []):
            rescoring.add_line(*line(thumb, index))
        for item in part:
            rescoring.accept(await rescoring.score(item.to_json()))
        results.append([experience async for experience in rescoring.learned_experiences()])
    assert [item.trajectory_id for item in results[1]] == [item.trajectory_id for item in runs[30:]]
    assert all((item.reward or 0.0) > 0.6 for item in results[1][::2])
    assert all(0.0 < (item.reward or 0.0) < 0.4 for item in results[1][1::2])


ERROR, REFERENCE = 0.05, 100


def test_the_bets_are_fair_however_long_one_looks() -> None:
    """The mean evidence over all sequences of coin tosses whose mean is the bound is 1 after every step."""
    bound = 0.3
    for length in range(1, 9):
        expected = 0.0
        for coins in itertools.product((0.0, 1.0), repeat=length):
            state = Agreement(pairs=REFERENCE, bound=bound)
            for coin in coins:
                state = state.with_pair(coin, reference=REFERENCE, error=ERROR)
            heads = sum(coins)
            expected += bound**heads * (1 - bound) ** (length - heads) * state.evidence(REFERENCE)
        assert expected == pytest.approx(1.0)


@pytest.mark.parametrize(("wrong", "count"), [(0, 20), (3, 20), (10, 50), (20, 20)])
def test_the_bound_is_that_of_an_exact_binomial_or_wider(wrong: int, count: int) -> None:
    """With a mean above the bound, so few errors have a probability below the permitted error."""
    bound = upper_bound(wrong / count, count, 0.05)
    assert bound >= min(0.95, wrong / count)
    with_pair = math.fsum(math.comb(count, n) * bound**n * (1 - bound) ** (count - n) for n in range(wrong + 1))
    assert wrong == count or with_pair <= 0.05 + 1e-9


def _stream(draw: random.Random, count: int, mean: float) -> list[float]:
    return [min(1.0, max(0.0, draw.gauss(mean, 0.2))) for _ in range(count)]


def _alarm(values: list[float]) -> int | None:
    state = Agreement()
    for number, value in enumerate(values, 1):
        state = state.with_pair(value, reference=REFERENCE, error=ERROR)
        if state.has_drifted(reference=REFERENCE, error=ERROR):
            return number
    return None


def test_a_judge_that_falls_is_found_after_it_was_good_for_long_and_a_steady_one_is_left_alone() -> None:
    draw = random.Random(0)
    assert [_alarm(_stream(draw, 600, 0.3)) for _ in range(10)] == [None] * 10
    for _ in range(10):
        alarm = _alarm(_stream(draw, 500, 0.25) + _stream(draw, 200, 0.6))
        assert alarm is not None
        assert 500 < alarm < 640


def test_what_it_knows_survives_being_stored() -> None:
    draw = random.Random(1)
    state = other = Agreement()
    for value in _stream(draw, 150, 0.3):
        state = state.with_pair(value, reference=REFERENCE, error=ERROR)
        other = Agreement.model_validate_json(
            other.with_pair(value, reference=REFERENCE, error=ERROR).model_dump_json()
        )
    assert state == other
