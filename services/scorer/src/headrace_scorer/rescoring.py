"""Scores stored trajectories again: the same functions, matching and policy as in the stream, without bus and database.

All feedback is known beforehand, so each branch gets one experience with its final reward, in the order of the
trajectories. Equal input gives equal output, byte for byte, if the reward functions are deterministic (P9).

The filter (`python -m headrace_scorer.replay`) reads lines `closed`, `feedback` and `reward` first: all that could be
about any of the trajectories. Then it reads lines `trajectory`. It ignores rewards of reward functions, because it
calls the functions again. It writes lines `experience` and at the end one line `scored`. After a line `store`, an
experience that is too large for a topic goes to the blob store, and a line `stored` refers to it.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field

from headrace_runtime.blobs import BlobStore
from headrace_runtime.clock import epoch_ms
from headrace_runtime.errors import InvalidEvent, SettingError
from headrace_runtime.filters import Lines
from headrace_runtime.isolation import is_fatal, reason_of
from headrace_runtime.logs import get_logger
from headrace_runtime.settings import Common
from headrace_schemas import Experience, Feedback, Reward, Trajectory
from headrace_schemas.blobs import PAYLOAD_BYTES_MAX
from headrace_schemas.replay import ClosedLine, FeedbackLine, ScoredLine
from headrace_scorer import feedback_matching, ledger, scores, store
from headrace_scorer.answer_remarks import Given, source_reward
from headrace_scorer.feedback_entries import ANY_CHOICE, EntryKey, FeedbackEntry, entries_of, thumbs_of
from headrace_scorer.feedback_matching import FeedbackSet
from headrace_scorer.functions.outcomes import Outcome
from headrace_scorer.functions.pool import FunctionPool
from headrace_scorer.functions.process import FunctionsRefused
from headrace_scorer.functions.protocol import CallRequest
from headrace_scorer.learned.features import features_of
from headrace_scorer.learned.replaying import LearnedReplay, TwiceRead
from headrace_scorer.learned.settings import PREFIX
from headrace_scorer.learned.source import LearnedSource
from headrace_scorer.reward_policy import SourceReward
from headrace_scorer.scoring import turn_values
from headrace_scorer.settings import ScorerSettings

log = get_logger(__name__)
_AT_ONCE_MAX = 64
_FUNCTION = "function:"


async def run(common: Common, settings: ScorerSettings) -> None:
    """The filter. Raises `SettingError` when a reward function cannot be used."""
    pool = FunctionPool(settings)
    try:
        await pool.reload()
        await _work(Rescoring(settings, pool), Lines(), BlobStore.open(common))
    except FunctionsRefused as error:
        raise SettingError("scorer.functions", settings.functions, str(error)) from None
    finally:
        await pool.close()


@dataclass(slots=True)
class _Output:
    """Writes experiences; after `store`, large ones into the blob store."""

    lines: Lines
    blobs: BlobStore
    largest: int = sys.maxsize

    async def put(self, experience: Experience) -> None:
        made = experience.to_json()
        if len(made) > self.largest:
            self.lines.write("stored", (await self.blobs.aput(made)).model_dump_json().encode())
        else:
            self.lines.write("experience", made)


async def _work(rescoring: Rescoring, lines: Lines, blobs: BlobStore) -> None:
    working: deque[asyncio.Task[Sequence[Experience] | ReadRun]] = deque()
    output = _Output(lines, blobs)

    async def first() -> None:
        for experience in rescoring.taken(await working.popleft()):
            await output.put(experience)

    async for word, value in lines.read():
        if word == "store":
            output.largest = PAYLOAD_BYTES_MAX
        elif word != "trajectory":
            rescoring.know(word, value)
        else:
            working.append(asyncio.ensure_future(rescoring.score(value)))
        if len(working) == _AT_ONCE_MAX:
            await first()
    while working:
        await first()
    async for experience in rescoring.learned():
        await output.put(experience)
    lines.write("scored", rescoring.report().model_dump_json().encode())
    lines.flush()


@dataclass(frozen=True, slots=True)
class ReadRun:
    """A trajectory that a reward model has yet to speak of."""

    trajectory: Trajectory
    features: Mapping[str, float]
    said: Mapping[str, float]
    """What each rater says of it."""
    called: Mapping[EntryKey, SourceReward]


@dataclass(slots=True)
class _Session:
    """The closed trajectories of a session, and its feedback."""

    closed: dict[str, feedback_matching.ClosedTrajectory] = field(default_factory=dict)
    partition: int | None = None
    feedback: dict[str, feedback_matching.PlacedFeedback] = field(default_factory=dict)


class Rescoring:
    """First `know` everything, then `score` each trajectory; several calls may run at once.

    `learning`: what a reward model knows of runs before these. Else it learns from these alone.
    """

    def __init__(self, settings: ScorerSettings, pool: FunctionPool, learning: LearnedReplay | None = None) -> None:
        self._settings = settings
        self._pool = pool
        self._policy = settings.policy([function.source for function in pool.functions])
        self._sessions: dict[tuple[str, str], _Session] = defaultdict(_Session)
        self._of_tasks: dict[tuple[str, str], dict[str, feedback_matching.PlacedFeedback]] = defaultdict(dict)
        self._rewards: dict[tuple[str, str], dict[EntryKey, Reward]] = defaultdict(dict)
        self._made: Counter[str] = Counter()
        self._not_trained: Counter[str] = Counter()
        self._outcomes: dict[str, Counter[str]] = defaultdict(Counter)
        self._trajectories = 0
        self._learning = learning
        if learning is None and settings.learned.model is not None:
            self._learning = LearnedReplay(LearnedSource(settings.learned, lambda: pool.functions))
        self._spool = TwiceRead()

    def know(self, word: str, value: bytes) -> None:
        """Take in a line that is no trajectory. Raises `InvalidEvent`, and `ValueError` for an unknown word."""
        if word == "feedback":
            placed = _placed(FeedbackLine.model_validate_json(value))
            event = placed.event
            if event.level == "task":
                self._of_tasks[event.tenant, event.task_id or ""].setdefault(event.event_id, placed)
            else:
                self._sessions[event.session_key, event.tenant].feedback.setdefault(event.event_id, placed)
        elif word == "reward":
            self._keep(Reward.from_json(value))
        elif word == "closed":
            one = ClosedLine.model_validate_json(value)
            closed = feedback_matching.ClosedTrajectory(one.trajectory_id, one.time_ms, one.place, one.began)
            session = self._sessions[one.session_key, one.tenant]
            session.closed.setdefault(one.trajectory_id, closed)
            session.partition = one.partition
        else:
            raise ValueError(f"a line begins with {word!r}; the scorer knows closed, feedback, reward and trajectory")

    async def score(self, value: bytes) -> Sequence[Experience] | ReadRun:
        """`_score`, in which a trajectory that cannot be scored is counted as `failed` and holds up no other."""
        try:
            return await self._score(value)
        except Exception as error:
            if is_fatal(error):
                raise
            log.exception("rescoring_failed", error=reason_of(error))
            self._not_trained["failed"] += 1
            return ()

    async def _score(self, value: bytes) -> Sequence[Experience] | ReadRun:
        """The experiences of one trajectory, one for each branch; none when it is held out or nothing was sampled.

        With a reward model nobody knows them before all were read: `taken` keeps it, and then `learned` has them.
        """
        self._trajectories += 1
        try:
            trajectory = Trajectory.from_json(value)
        except InvalidEvent:  # the collector's dead letter says why; here it is only counted
            self._not_trained["unreadable"] += 1
            return ()
        why = "eval" if trajectory.purpose == "eval" else trajectory.untrained
        if why or not trajectory.branches:
            self._not_trained[why or "nothing_sampled"] += 1
            return ()
        feedback_set = self._feedback_for(trajectory)
        called, rows = await self._called(trajectory, value, feedback_set)
        if self._learning is None:
            return self._experiences(trajectory, feedback_set, called)
        features = features_of(trajectory, [*rows, *self._others(trajectory)], self._learning.source.counts)
        answers, teachers = store.branch_answers(trajectory), self._settings.learned.teachers
        said = thumbs_of(feedback_set, answers, self._settings.labels, teachers)
        return ReadRun(trajectory, features, said, called)

    def taken(self, scored: Sequence[Experience] | ReadRun) -> Sequence[Experience]:
        """What can be written of it. Called in the order of the trajectories."""
        if not isinstance(scored, ReadRun):
            return scored
        assert self._learning is not None
        self._learning.know(scored.trajectory, scored.features, scored.said)
        features = json.dumps(scored.features).encode()
        self._spool.write(scored.trajectory.to_json(), features, _packed(scored.called))
        return ()

    async def learned(self) -> AsyncIterator[Experience]:
        """What a reward model makes of the trajectories, after the last one was read."""
        if self._learning is None:
            return
        await self._learning.fit()
        for value, features, called in self._spool.read(3):
            trajectory = Trajectory.from_json(value)
            spoken = self._learning.reward(trajectory, json.loads(features))
            feedback_set = self._feedback_for(trajectory)
            known = {EntryKey(*key): SourceReward(*reward) for key, reward in json.loads(called)}
            self._outcomes[self._learning.source.name].update(one.outcome for one in spoken.values())
            try:
                experiences = self._experiences(trajectory, feedback_set, known | spoken)
            except Exception as error:
                log.exception("rescoring_failed", error=reason_of(error))
                self._not_trained["failed"] += 1
                continue
            for experience in experiences:
                yield experience
        self._spool.close()

    def _experiences(
        self, trajectory: Trajectory, feedback_set: FeedbackSet, called: Mapping[EntryKey, SourceReward]
    ) -> list[Experience]:
        settings = self._settings
        entries = entries_of(feedback_set, store.branch_answers(trajectory), settings.labels, settings.corrections_max)
        rewards = {**self._given(trajectory, entries), **called}
        given = {key: entry.detail or "" for key, entry in entries.items() if entry.outcome == "given"}
        made = [
            self._experience(trajectory, feedback_set, index, list(rewards.values()), given)
            for index in range(len(trajectory.branches))
        ]
        self._made.update(one.no_reward or "rewarded" for one in made)
        return made

    def _others(self, trajectory: Trajectory) -> list[ledger.Row]:
        """What sources besides functions said of the run, as the ledger has it."""
        rewards = self._rewards.get((trajectory.trajectory_id, trajectory.tenant), {})
        return [_row(one.source, one.turn_id or "", one) for one in rewards.values()]

    def report(self) -> ScoredLine:
        return ScoredLine(
            trajectories=self._trajectories,
            experiences=dict(sorted(self._made.items())),
            not_trained=dict(sorted(self._not_trained.items())),
            outcomes={source: dict(sorted(counts.items())) for source, counts in sorted(self._outcomes.items())},
        )

    def _keep(self, reward: Reward) -> None:
        """Keep the highest revision of each source for each target."""
        known = self._rewards[reward.trajectory_id, reward.tenant]
        choice = ANY_CHOICE if reward.choice is None else reward.choice
        key = EntryKey.reward(reward.source, reward.turn_id or "", choice)
        again = reward.source.startswith((_FUNCTION, PREFIX))  # functions are called, and models learn, again
        if again or (key in known and known[key].revision >= reward.revision):
            return
        if key in known or len({one.source for one in known} | {reward.source}) <= self._settings.sources_max:
            known[key] = reward

    def _feedback_for(self, trajectory: Trajectory) -> FeedbackSet:
        session = self._sessions.get((trajectory.session_key, trajectory.tenant), _Session())
        found = self._feedback_of_session(trajectory, session)
        task_id = found.named("task_id", trajectory.task_id)
        copies = self._of_tasks.get((trajectory.tenant, task_id or ""), {}).values()
        return feedback_matching.with_task(found, [one for one in copies if one.event.partition == session.partition])

    def _feedback_of_session(self, trajectory: Trajectory, session: _Session) -> FeedbackSet:
        turns = set(trajectory.turn_ids)
        feedback = session.feedback.values()
        listing = [one for one in feedback if turns.intersection(one.event.msg_ids)]
        general = [one for one in feedback if not one.event.msg_ids]
        peers = session.closed
        if trajectory.trajectory_id not in peers:  # no line `closed` named it: it is then the only one of its session
            own = (epoch_ms(trajectory.time), 0, trajectory.turns_from)
            peers = {
                **peers,
                trajectory.trajectory_id: feedback_matching.ClosedTrajectory(trajectory.trajectory_id, *own),
            }
        return feedback_matching.feedback_for(trajectory.trajectory_id, list(peers.values()), listing, general)

    def _given(self, trajectory: Trajectory, entries: Mapping[EntryKey, FeedbackEntry]) -> dict[EntryKey, SourceReward]:
        """The rewards of other sources; those of feedback are made from the feedback itself."""
        rewards = self._rewards.get((trajectory.trajectory_id, trajectory.tenant), {})
        found = {key: source_reward(key, one.outcome, one.value) for key, one in rewards.items()}
        for key, entry in entries.items():
            if key.kind == "reward":
                found[key] = source_reward(key, entry.outcome, entry.value)
        return found

    async def _called(
        self, trajectory: Trajectory, value: bytes, feedback_set: FeedbackSet
    ) -> tuple[dict[EntryKey, SourceReward], list[ledger.Row]]:
        """What functions say, and the same as the ledger has it."""
        found: dict[EntryKey, SourceReward] = {}
        rows = []
        feedback = tuple(one.to_json().decode() for one in feedback_set.all)
        context = feedback_set.context(trajectory.context)
        for function in self._pool.functions:
            outcome = await self._pool.call(
                CallRequest(function=function.name, feedback=feedback, context=context), value
            )
            key = EntryKey.reward(function.source)
            found[key] = source_reward(key, outcome.outcome, outcome.value)
            for turn_id, worth in turn_values(trajectory, outcome).items():
                key = EntryKey.reward(function.source, turn_id)
                found[key] = source_reward(key, "scored", worth)
            self._outcomes[function.source][outcome.outcome] += 1
            rows.append(_row(function.source, "", outcome))
        return found, rows

    def _experience(
        self,
        trajectory: Trajectory,
        feedback_set: FeedbackSet,
        index: int,
        rewards: Sequence[SourceReward],
        given: Given,
    ) -> Experience:
        return scores.experience(
            trajectory,
            index,
            rewards,
            given,
            self._policy,
            rewarded=False,
            now=trajectory.time,
            revision=0,
            task_id=feedback_set.named("task_id", trajectory.task_id),
            run_id=feedback_set.named("run_id", trajectory.run_id),
            parts=max(trajectory.parts, feedback_set.parts),
        )


def _packed(called: Mapping[EntryKey, SourceReward]) -> bytes:
    return json.dumps([[[*key], [*astuple(reward)]] for key, reward in called.items()]).encode()


def _row(source: str, turn_id: str, said: Reward | Outcome) -> ledger.Row:
    criteria = json.dumps(said.criteria) if said.criteria else None
    known = {"source": source, "turn_id": turn_id, "outcome": said.outcome, "value": said.value}
    return {**known, "criteria": criteria, "feedback_id": None}


def _placed(line: FeedbackLine) -> feedback_matching.PlacedFeedback:
    return feedback_matching.PlacedFeedback(
        Feedback.model_validate(line.event), line.place, line.turns_until, line.trajectories_until
    )
