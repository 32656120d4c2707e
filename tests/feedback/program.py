"""Feedback of every kind in random order against an in-order oracle.

Faults that the comparison with the oracle has to notice, each planted alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import structlog

from headrace_gateway.requests.feedback_request import FeedbackRequest
from headrace_operations import turn_states
from headrace_schemas import Branch, Experience, Feedback, PreferenceSide
from headrace_schemas.events.opinion import Opinion, values_of
from headrace_scorer import feedback_entries, feedback_matching, scores
from headrace_scorer.feedback_matching import FeedbackSet, PlacedFeedback
from headrace_scorer.reward_policy import RewardPolicy
from headrace_trainer.experiences import admission, state
from headrace_trainer.experiences.examples import CorrectionRules
from tests.feedback.playing import TRAINED, differing, replayed, talk
from tests.feedback.world import Sampled, Saying
from tests.system.program import Line, Program, Run, caught, no_problems

_SET_OF = feedback_matching.feedback_for
_TASK = feedback_matching.with_task
_TOGETHER = feedback_entries._combine_raters
_EDITS = feedback_entries._edits
_SIDE = feedback_entries._side
_STATE = scores._state


@dataclass(frozen=True)
class Fault:
    """A plausible fault, by name."""

    name: str
    planted: Callable[[], AbstractContextManager[Any]]


def _by_the_clock(*arguments: Any) -> FeedbackSet:
    feedback_set = _SET_OF(*arguments)
    return FeedbackSet(tuple(sorted(feedback_set.all, key=lambda feedback: (feedback.time, feedback.feedback_id))))


def _by_id(name: str, peers: Any, *placed: Iterable[PlacedFeedback]) -> FeedbackSet:
    listing, general = ([replace(entry, offset=0) for entry in some] for some in placed)
    return _SET_OF(name, peers, listing, general)


def _task_last(feedback_set: FeedbackSet, of_task: Iterable[PlacedFeedback]) -> FeedbackSet:
    with_tasks = _TASK(feedback_set, of_task)
    return FeedbackSet((*(feedback for feedback in with_tasks.all if feedback.level != "task"), *with_tasks.of_task))


def _first_word(words: Any) -> Any:
    return _TOGETHER([word for word in words if not word.feedback.withdrawn][:1] or words)


@contextlib.contextmanager
def _withdrawal_unheard() -> Iterator[None]:
    """Count withdrawn feedback."""
    sound = values_of

    def faulty(feedback: Feedback, labels: Any) -> Any:
        yield from () if feedback.withdrawn else sound(feedback, labels)

    with mock.patch.object(feedback_entries, "values_of", faulty):
        yield


def _edits_stay(feedback_set: FeedbackSet, *rest: Any) -> Any:
    return _EDITS(
        FeedbackSet(
            tuple(
                feedback
                for feedback in feedback_set.all
                if not (feedback.feedback_kind == "edit" and feedback.withdrawn)
            )
        ),
        *rest,
    )


def _swapped(key: Any, detail: str) -> PreferenceSide:
    return _SIDE(key, "rejected" if detail == "chosen" else "chosen")


def _reward_alone(experience: Experience) -> str:
    return _STATE(experience.model_copy(update={"turn_rewards": (), "edits": (), "preferences": ()}))


@contextlib.contextmanager
def _raw_ratings() -> Iterator[None]:
    """A rating counts as it is, whatever its scale."""
    sound = values_of

    def faulty(feedback: Feedback, labels: Any) -> Any:
        yield from (
            (source, feedback.rating if feedback.rating is not None else value)
            for source, value in sound(feedback, labels)
        )

    with mock.patch.object(feedback_entries, "values_of", faulty):
        yield


@contextlib.contextmanager
def _one_rater() -> Iterator[None]:
    """Count all raters of a source as one."""
    sound = feedback_entries._rewards

    def faulty(feedback_set: FeedbackSet, *rest: Any) -> Any:
        return sound(
            FeedbackSet(tuple(feedback.model_copy(update={"rater": None}) for feedback in feedback_set.all)), *rest
        )

    with mock.patch.object(feedback_entries, "_rewards", faulty):
        yield


@contextlib.contextmanager
def _metric_forgotten() -> Iterator[None]:
    with mock.patch.object(Opinion, "metric_source", property(lambda self: self.source)):
        yield


@contextlib.contextmanager
def _choice_forgotten() -> Iterator[None]:
    """Take feedback about the second answer for feedback about the first."""
    sound = FeedbackRequest.model_validate

    def faulty(body: Any) -> FeedbackRequest:
        return sound({name: 0 if name == "choice" else value for name, value in body.items()})

    with mock.patch.object(FeedbackRequest, "model_validate", faulty):
        yield


def _all(rewards: Any, _branch: Any) -> Any:
    return list(rewards)


def _patch(where: Any, name: str, instead: Any) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: mock.patch.object(where, name, instead)


@contextlib.contextmanager
def _answers_forgotten() -> Iterator[None]:
    """Take answers without logprobs for observations, as before they were in branches."""
    sound = feedback_entries.answers_of

    def faulty(branch: Branch) -> Any:
        return {} if branch.sampled is None else sound(branch.sampled)

    with mock.patch.object(feedback_entries, "answers_of", faulty):
        yield


@contextlib.contextmanager
def _last_word_unheard() -> Iterator[None]:
    """Train no correction: the first word about an answer stays."""
    sound = admission.pending_updates_of

    def faulty(experience: Experience, entry: Any, *rest: Any) -> Any:
        return () if entry is not None and entry.trained else sound(experience, entry, *rest)

    with mock.patch.object(state, "pending_updates_of", faulty):
        yield


def _every_version(experience: Experience, _rules: CorrectionRules) -> list[str]:
    return [] if experience.branch is None else [span.version for span in experience.branch.spans]


FAULTS = (
    Fault("answers without logprobs have no feedback", _answers_forgotten),
    Fault("clocks order what was said", _patch(feedback_matching, "feedback_for", _by_the_clock)),
    Fault("ids order what was said", _patch(feedback_matching, "feedback_for", _by_id)),
    Fault("a task goes before its session", _patch(feedback_matching, "with_task", _task_last)),
    Fault("the first rater counts alone", _patch(feedback_entries, "_combine_raters", _first_word)),
    Fault("what was taken back counts", _withdrawal_unheard),
    Fault("all raters have one voice", _one_rater),
    Fault("edits that were taken back stay", _patch(feedback_entries, "_edits", _edits_stay)),
    Fault("chosen and rejected are swapped", _patch(feedback_entries, "_side", _swapped)),
    Fault("a changed edit raises no revision", _patch(scores, "_state", _reward_alone)),
    Fault("a choice's reward is every branch's", _patch(feedback_entries, "rewards_about_branch", _all)),
    Fault("turn rewards are forgotten", _patch(RewardPolicy, "turn_reward", lambda _self, _rewards, _turn: None)),
    Fault("a rating counts without its scale", _raw_ratings),
    Fault("a metric counts as its source", _metric_forgotten),
    Fault("the second answer is taken for the first", _choice_forgotten),
)

TRAINING_FAULTS = (
    Fault(
        "a trainer leaves out answers without logprobs",
        _patch(CorrectionRules, "trained_branch", lambda _rules, branch: branch.sampled),
    ),
    Fault("another server's answer is of no known version", _patch(admission, "versions_of", _every_version)),
    Fault("a revised word is not trained", _last_word_unheard),
    Fault("feedback without effect is not named", _patch(turn_states, "unused_reason", lambda *_: None)),
)
"""Faults that only the comparison with the trained experiences can notice."""


_PLANTED_EVENTS = 300
_PLANTED_ATTEMPTS = 4
"""Seeds with which a planted fault is played until it is noticed: 300 events may have no case that it changes."""
_TRAINED_EVENTS = 1_000
"""Events of a play whose experiences are trained. All answers that preferences connect wait for one batch of `dpo`."""


def play(run: Run) -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    seed, events, database = run.seed, run.options.events, run.options.database
    _, feedbacks = talk(seed, events)
    with run.progress(events, "events") as progress:

        def tick(count: int) -> None:
            progress.advance(count, activity="sending feedback to the scorer")

        problems = asyncio.run(differing(database, run.folder / "all", seed, events, tick=tick))
        run.add(no_problems(f"{events} events end as the oracle expects", problems))
        problems = []
        plays = max(1, events // _TRAINED_EVENTS)
        for number in range(plays):
            progress.update(activity=f"training what was said, play {number + 1} of {plays}")
            folder, count = run.folder / f"trained-{number}", min(events, _TRAINED_EVENTS)
            problems += asyncio.run(differing(database, folder, seed + number, count, algorithms=TRAINED))
        name = f"{min(events, _TRAINED_EVENTS * plays)} events end in the weights of {', '.join(TRAINED)}, or are named"
        run.add(no_problems(name, problems))
        for sampled, forms in _forms_by_sampling(feedbacks).items():
            name = f"edits, preferences and other feedback about answers of {sampled}"
            run.add(Line(name, str(forms), "each above 0", min(forms) > 0))
        problems = asyncio.run(differing(database, run.folder / "sum", seed + 1, _PLANTED_EVENTS, "sum"))
        run.add(no_problems("sums end as the oracle expects", problems))
        run.add(no_problems("a replay of the events ends the same", asyncio.run(replayed(seed, events))))
        for number, fault in enumerate(FAULTS):
            progress.update(activity=f"planting: {fault.name}")
            with fault.planted():
                noticed = any(
                    asyncio.run(
                        differing(database, run.folder / f"{number}-{attempt}", seed + attempt, _PLANTED_EVENTS)
                    )
                    for attempt in range(_PLANTED_ATTEMPTS)
                )
            run.add(caught(fault.name, by_the_suite=noticed))
        for number, fault in enumerate(TRAINING_FAULTS, len(FAULTS)):
            progress.update(activity=f"planting: {fault.name}")
            play = differing(database, run.folder / str(number), seed, _PLANTED_EVENTS, algorithms=TRAINED)
            with fault.planted():
                problems = asyncio.run(play)
            run.add(caught(fault.name, by_the_suite=bool(problems)))
    run.figures |= {
        "events": events,
        "forms": dict(sorted(Counter(feedback.form for feedback in feedbacks).items())),
        "withdrawn": sum(feedback.withdrawn for feedback in feedbacks),
        "clocks_apart_s": round(
            max(feedback.skew_s for feedback in feedbacks) - min(feedback.skew_s for feedback in feedbacks)
        ),
    }


def _forms_by_sampling(feedbacks: Sequence[Saying]) -> dict[Sampled, list[int]]:
    """Return the number of edits, preferences and other feedback about answers without logprobs."""
    counts: dict[Sampled, list[int]] = {"temperature 0": [0, 0, 0], "top_p": [0, 0, 0], "foreign": [0, 0, 0]}
    for saying in feedbacks:
        form = {"edit": 0, "preference": 1}.get(saying.form, 2)
        for sampled in {saying.scene.sampled[turn] for turn, _ in saying.answers if turn in saying.scene.sampled}:
            if sampled in counts:
                counts[sampled][form] += not saying.withdrawn
    return counts


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--events", type=int, default=10_000, help="number of events (default: %(default)s)")
    parser.add_argument("--database", default="sqlite", help="`database.url` of the scorer (default: %(default)s)")


PROGRAM = Program("Compare random feedback with an in-order oracle.", play, _add_arguments)
