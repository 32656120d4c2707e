"""The program `python -m headrace_scorer.replay`, which scores stored trajectories again.

It uses the reward functions, the matching and the reward policy of the stream, but no bus and no database. All feedback
is read beforehand, so each branch gets one experience with its final reward, in the order of the trajectories. Equal
input gives equal output, byte for byte, if the reward functions are deterministic.

The program reads lines from standard input: first the lines `closed`, `feedback` and `reward` that may be about any of
the trajectories, then the lines `trajectory`. It ignores rewards of reward functions, because it calls the functions
again. It writes lines `experience` and at the end one line `scored`. After a line `store`, it writes experiences that
are too large for a topic to the blob store, and a line `stored` that refers to each.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field

from headrace_runtime.clock import epoch_ms
from headrace_runtime.errors import InvalidEvent, SettingError
from headrace_runtime.main import Service
from headrace_runtime.process.logs import get_logger
from headrace_runtime.process.programs import Lines
from headrace_runtime.settings.sections import Common
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.storage.isolation import is_fatal, reason_of
from headrace_schemas import Experience, Feedback, Reward, Trajectory
from headrace_schemas.programs import ClosedLine, FeedbackLine, ScoredLine
from headrace_schemas.values.blobs import PAYLOAD_BYTES_MAX
from headrace_scorer import feedback_matching, ledger, scores, store
from headrace_scorer.feedback_entries import (
    ANY_CHOICE,
    Corrections,
    EntryKey,
    FeedbackEntry,
    entries_of,
    source_reward,
    thumbs_of,
)
from headrace_scorer.feedback_matching import FeedbackSet
from headrace_scorer.functions.outcomes import CallRequest, Outcome
from headrace_scorer.functions.process import FunctionPool, FunctionsRefused
from headrace_scorer.learned.columns import features_of
from headrace_scorer.learned.models import PREFIX
from headrace_scorer.learned.refitting import LearnedReplay, LearnedSource, TemporaryLines
from headrace_scorer.ledger import CORRECTIONS_MAX, SOURCES_MAX
from headrace_scorer.reward_policy import SourceReward
from headrace_scorer.scores import turn_values
from headrace_scorer.settings import ScorerSettings

SERVICE = Service("scorer", "Scores stored trajectories again.", ScorerSettings, "headrace_scorer.replay:run")
log = get_logger(__name__)
_AT_ONCE_MAX = 64
_FUNCTION = "function:"


async def run(common: Common, settings: ScorerSettings) -> None:
    """Process standard input to standard output. Raises `SettingError` if a reward function cannot be loaded."""
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
    """Writer of experiences as lines on standard output. An experience above `largest` bytes goes to the blob store."""

    lines: Lines
    blobs: BlobStore
    largest: int = sys.maxsize

    async def put(self, experience: Experience) -> None:
        payload = experience.to_json()
        if len(payload) > self.largest:
            self.lines.write("stored", (await self.blobs.aput(payload)).model_dump_json().encode())
        else:
            self.lines.write("experience", payload)


async def _work(rescoring: Rescoring, lines: Lines, blobs: BlobStore) -> None:
    """Read all lines, score up to `_AT_ONCE_MAX` trajectories at a time, and write the results in the order of the
    lines.
    """
    working: deque[asyncio.Task[Sequence[Experience] | FeaturedRun]] = deque()
    output = _Output(lines, blobs)

    async def write_oldest() -> None:
        for experience in rescoring.accept(await working.popleft()):
            await output.put(experience)

    async for word, value in lines.read():
        if word == "store":
            output.largest = PAYLOAD_BYTES_MAX
        elif word != "trajectory":
            rescoring.add_line(word, value)
        else:
            working.append(asyncio.ensure_future(rescoring.score(value)))
        if len(working) == _AT_ONCE_MAX:
            await write_oldest()
    while working:
        await write_oldest()
    async for experience in rescoring.learned_experiences():
        await output.put(experience)
    lines.write("scored", rescoring.report().model_dump_json().encode())
    lines.flush()


@dataclass(frozen=True, slots=True)
class FeaturedRun:
    """A trajectory with its features and rewards, whose experiences wait until the reward model is fitted."""

    trajectory: Trajectory
    features: Mapping[str, float]
    thumbs: Mapping[str, float]
    """Value of each rater."""
    function_rewards: Mapping[EntryKey, SourceReward]


@dataclass(slots=True)
class _Session:
    """Closed trajectories and feedback of one session, as read from the input lines."""

    closed: dict[str, feedback_matching.ClosedTrajectory] = field(default_factory=dict)
    partition: int | None = None
    feedback: dict[str, feedback_matching.PlacedFeedback] = field(default_factory=dict)


class Rescoring:
    """Scorer of stored trajectories, without bus and database.

    Call `add_line` for all other lines first, then `score` for each trajectory (several calls may run at once), then
    `accept` with the results in the order of the trajectories, and in the end `learned_experiences`.

    Args:
        learning: reward models with runs from before these trajectories. By default they learn from these alone.
    """

    def __init__(self, settings: ScorerSettings, pool: FunctionPool, learning: LearnedReplay | None = None) -> None:
        self._settings = settings
        self._pool = pool
        self._policy = settings.policy([function.source for function in pool.functions])
        self._sessions: dict[tuple[str, str], _Session] = defaultdict(_Session)
        self._task_feedback: dict[tuple[str, str], dict[str, feedback_matching.PlacedFeedback]] = defaultdict(dict)
        self._rewards: dict[tuple[str, str], dict[EntryKey, Reward]] = defaultdict(dict)
        self._experience_counts: Counter[str] = Counter()
        self._not_trained: Counter[str] = Counter()
        self._outcomes: dict[str, Counter[str]] = defaultdict(Counter)
        self._trajectories = 0
        self._learning = learning
        if learning is None and settings.learned.model is not None:
            self._learning = LearnedReplay(LearnedSource(settings.learned, lambda: pool.functions))
        self._spool = TemporaryLines()

    def add_line(self, word: str, value: bytes) -> None:
        """Store an input line of the program: `feedback`, `reward` or `closed` (the end of a run).

        Raises:
            InvalidEvent: the content is invalid.
            ValueError: the word is none of these.
        """
        if word == "feedback":
            placed = _placed_feedback(FeedbackLine.model_validate_json(value))
            event = placed.event
            if event.level == "task":
                self._task_feedback[event.tenant, event.task_id or ""].setdefault(event.event_id, placed)
            else:
                self._sessions[event.session_key, event.tenant].feedback.setdefault(event.event_id, placed)
        elif word == "reward":
            self._add_reward(Reward.from_json(value))
        elif word == "closed":
            line = ClosedLine.model_validate_json(value)
            closed = feedback_matching.ClosedTrajectory(line.trajectory_id, line.time_ms, line.place, line.began)
            session = self._sessions[line.session_key, line.tenant]
            session.closed.setdefault(line.trajectory_id, closed)
            session.partition = line.partition
        else:
            raise ValueError(
                f"a line begins with {word!r}; it must begin with closed, feedback, reward, trajectory or store"
            )

    async def score(self, value: bytes) -> Sequence[Experience] | FeaturedRun:
        """Score one trajectory, whose JSON is `value`. Count it as `failed` if that raises an error.

        Returns:
            The trajectory's experiences, one for each branch, or none if it is not trained. With a reward model, return
            the run with its features instead, for `accept`.
        """
        try:
            return await self._score(value)
        except Exception as error:
            if is_fatal(error):
                raise
            log.exception("rescoring_failed", error=reason_of(error))
            self._not_trained["failed"] += 1
            return ()

    async def _score(self, value: bytes) -> Sequence[Experience] | FeaturedRun:
        self._trajectories += 1
        try:
            trajectory = Trajectory.from_json(value)
        except InvalidEvent:  # the collector's dead letter has the reason; here it is only counted
            self._not_trained["unreadable"] += 1
            return ()
        reason = "eval" if trajectory.purpose == "eval" else trajectory.untrained
        if reason or not trajectory.branches:
            self._not_trained[reason or "nothing_sampled"] += 1
            return ()
        feedback_set = self._feedback_for(trajectory)
        function_rewards, rows = await self._call_functions(trajectory, value, feedback_set)
        if self._learning is None:
            return self._experiences(trajectory, feedback_set, function_rewards)
        features = features_of(trajectory, [*rows, *self._bus_reward_rows(trajectory)], self._learning.source.counts)
        answers, teachers = store.branch_answers(trajectory), self._settings.learned.teachers
        thumbs = thumbs_of(feedback_set, answers, self._settings.labels, teachers)
        return FeaturedRun(trajectory, features, thumbs, function_rewards)

    def accept(self, scored: Sequence[Experience] | FeaturedRun) -> Sequence[Experience]:
        """Return the experiences that can be written now. A `FeaturedRun` waits for `learned_experiences`."""
        if not isinstance(scored, FeaturedRun):
            return scored
        assert self._learning is not None
        self._learning.add_run(scored.trajectory, scored.features, scored.thumbs)
        features = json.dumps(scored.features).encode()
        self._spool.write(scored.trajectory.to_json(), features, _rewards_to_json(scored.function_rewards))
        return ()

    async def learned_experiences(self) -> AsyncIterator[Experience]:
        """Fit the reward model to the accepted runs, and yield their experiences with the rewards that it
        gives.
        """
        if self._learning is None:
            return
        await self._learning.fit()
        for value, features, called in self._spool.read(3):
            trajectory = Trajectory.from_json(value)
            learned_rewards = self._learning.reward(trajectory, json.loads(features))
            feedback_set = self._feedback_for(trajectory)
            function_rewards = {EntryKey(*key): SourceReward(*reward) for key, reward in json.loads(called)}
            self._outcomes[self._learning.source.name].update(reward.outcome for reward in learned_rewards.values())
            try:
                experiences = self._experiences(trajectory, feedback_set, function_rewards | learned_rewards)
            except Exception as error:
                log.exception("rescoring_failed", error=reason_of(error))
                self._not_trained["failed"] += 1
                continue
            for experience in experiences:
                yield experience
        self._spool.close()

    def _experiences(
        self, trajectory: Trajectory, feedback_set: FeedbackSet, computed: Mapping[EntryKey, SourceReward]
    ) -> list[Experience]:
        """Return one experience per branch from `computed`, the rewards of reward functions and of the reward model."""
        settings = self._settings
        entries = entries_of(feedback_set, store.branch_answers(trajectory), settings.labels, CORRECTIONS_MAX)
        rewards = {**self._bus_and_feedback_rewards(trajectory, entries), **computed}
        corrections = {key: entry.detail or "" for key, entry in entries.items() if entry.outcome == "given"}
        experiences = [
            self._experience(trajectory, feedback_set, index, list(rewards.values()), corrections)
            for index in range(len(trajectory.branches))
        ]
        self._experience_counts.update(experience.no_reward or "rewarded" for experience in experiences)
        return experiences

    def _bus_reward_rows(self, trajectory: Trajectory) -> list[ledger.Row]:
        """Return the rewards of the run from lines `reward`, as rows of the ledger."""
        rewards = self._rewards.get((trajectory.trajectory_id, trajectory.tenant), {})
        return [_row(reward.source, reward.turn_id or "", reward) for reward in rewards.values()]

    def report(self) -> ScoredLine:
        """Return the line `scored` with the counts of the trajectories and their experiences."""
        return ScoredLine(
            trajectories=self._trajectories,
            experiences=dict(sorted(self._experience_counts.items())),
            not_trained=dict(sorted(self._not_trained.items())),
            outcomes={source: dict(sorted(counts.items())) for source, counts in sorted(self._outcomes.items())},
        )

    def _add_reward(self, reward: Reward) -> None:
        """Store a reward line unless a higher revision is stored or rescoring computes rewards of its source itself."""
        rewards = self._rewards[reward.trajectory_id, reward.tenant]
        choice = ANY_CHOICE if reward.choice is None else reward.choice
        key = EntryKey.reward(reward.source, reward.turn_id or "", choice)
        recomputed = reward.source.startswith((_FUNCTION, PREFIX))
        if recomputed or (key in rewards and rewards[key].revision >= reward.revision):
            return
        if key in rewards or len({other.source for other in rewards} | {reward.source}) <= SOURCES_MAX:
            rewards[key] = reward

    def _feedback_for(self, trajectory: Trajectory) -> FeedbackSet:
        session = self._sessions.get((trajectory.session_key, trajectory.tenant), _Session())
        session_feedback = self._feedback_of_session(trajectory, session)
        task_id = session_feedback.resolve_id("task_id", trajectory.task_id)
        copies = self._task_feedback.get((trajectory.tenant, task_id or ""), {}).values()
        of_task = [record for record in copies if record.event.partition == session.partition]
        return feedback_matching.with_task(session_feedback, of_task)

    def _feedback_of_session(self, trajectory: Trajectory, session: _Session) -> FeedbackSet:
        turns = set(trajectory.turn_ids)
        feedback = session.feedback.values()
        listing = [record for record in feedback if turns.intersection(record.event.msg_ids)]
        general = [record for record in feedback if not record.event.msg_ids]
        peers = session.closed
        name = trajectory.trajectory_id
        if name not in peers:  # without a line `closed` it is the only trajectory of its session
            closed = feedback_matching.ClosedTrajectory(name, epoch_ms(trajectory.time), 0, trajectory.turns_from)
            peers = {**peers, name: closed}
        runs = feedback_matching.ClosedRuns(peers.values())
        return feedback_matching.feedback_for(trajectory.trajectory_id, runs, listing, general)

    def _bus_and_feedback_rewards(
        self, trajectory: Trajectory, entries: Mapping[EntryKey, FeedbackEntry]
    ) -> dict[EntryKey, SourceReward]:
        """Return the rewards from lines `reward`, replaced by those that feedback gives for the same key."""
        bus_rewards = self._rewards.get((trajectory.trajectory_id, trajectory.tenant), {})
        rewards = {key: source_reward(key, reward.outcome, reward.value) for key, reward in bus_rewards.items()}
        for key, entry in entries.items():
            if key.kind == "reward":
                rewards[key] = source_reward(key, entry.outcome, entry.value)
        return rewards

    async def _call_functions(
        self, trajectory: Trajectory, value: bytes, feedback_set: FeedbackSet
    ) -> tuple[dict[EntryKey, SourceReward], list[ledger.Row]]:
        """Call all reward functions. Return their rewards as input of the reward policy, and as rows of the ledger."""
        rewards: dict[EntryKey, SourceReward] = {}
        rows = []
        feedback = tuple(event.to_json().decode() for event in feedback_set.all)
        context = feedback_set.context(trajectory.context)
        for function in self._pool.functions:
            outcome = await self._pool.call(
                CallRequest(function=function.name, feedback=feedback, context=context), value
            )
            key = EntryKey.reward(function.source)
            rewards[key] = source_reward(key, outcome.outcome, outcome.value)
            for turn_id, turn_value in turn_values(trajectory, outcome).items():
                key = EntryKey.reward(function.source, turn_id)
                rewards[key] = source_reward(key, "scored", turn_value)
            self._outcomes[function.source][outcome.outcome] += 1
            rows.append(_row(function.source, "", outcome))
        return rewards, rows

    def _experience(
        self,
        trajectory: Trajectory,
        feedback_set: FeedbackSet,
        index: int,
        rewards: Sequence[SourceReward],
        corrections: Corrections,
    ) -> Experience:
        return scores.experience(
            trajectory,
            index,
            rewards,
            corrections,
            self._policy,
            rewarded=False,
            now=trajectory.time,
            revision=0,
            task_id=feedback_set.resolve_id("task_id", trajectory.task_id),
            run_id=feedback_set.resolve_id("run_id", trajectory.run_id),
            parts=max(trajectory.parts, feedback_set.session_count),
        )


def _rewards_to_json(rewards: Mapping[EntryKey, SourceReward]) -> bytes:
    return json.dumps([[[*key], [*astuple(reward)]] for key, reward in rewards.items()]).encode()


def _row(source: str, turn_id: str, result: Reward | Outcome) -> ledger.Row:
    criteria = json.dumps(result.criteria) if result.criteria else None
    columns = {"source": source, "turn_id": turn_id, "outcome": result.outcome, "value": result.value}
    return {**columns, "criteria": criteria, "feedback_id": None}


def _placed_feedback(line: FeedbackLine) -> feedback_matching.PlacedFeedback:
    event = Feedback.model_validate(line.event)
    size_bytes = len(event.to_json())
    return feedback_matching.PlacedFeedback(event, line.place, line.turns_until, line.trajectories_until, size_bytes)


if __name__ == "__main__":
    SERVICE.main()
