"""The trainer's work repeated from public data: turns and reports on the bus, versions in blobs.

Each batch is built again from the tokens and logprobs of the captured *turns*. If one of them had been trained
differently, the resulting weights would not be the published ones.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from headrace_runtime.storage import versions as files
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import Branch, Experience, Span, TrainingMetrics, Turn
from headrace_trainer.batches.batch import Batch, Row
from headrace_trainer.experiences.history import PublishedVersion
from headrace_trainer.lineage import versions
from headrace_trainer.lineage.saved import SavedState
from headrace_trainer.lineage.store import LineageStore
from headrace_trainer.settings import TrainerSettings
from headrace_trainer.torch_learner.model.policy import Policy
from headrace_trainer.torch_learner.optimizer import Optimizer
from headrace_trainer.torch_learner.step import train
from tests.e2e.circle import Observed


@dataclass
class Retraining:
    """A trainer's lineage seen from outside."""

    settings: TrainerSettings
    blobs: BlobStore
    saved: SavedState
    experiences: Mapping[tuple[str, int], Experience]
    """Experiences by id and revision, with the branch rebuilt from the turns."""
    batches: Mapping[int, Sequence[tuple[Experience, float, float | None]]]
    """Step to the experiences and advantages of its batch, in order; corrections with the weight of their tokens."""
    digests: Mapping[int, str]
    """Step to the digest of the batch that was trained, as the trainer reported it."""

    @classmethod
    def of(cls, settings: TrainerSettings, folder: Path, observed: Observed) -> Retraining:
        """Read the data directory `folder`, without any change to it."""
        blobs = BlobStore((folder / "blobs").as_uri())
        saved = LineageStore(blobs, settings.lineage).read()
        assert saved is not None
        turns = {turn.turn_id: turn for turn in observed.all(Turn)}
        experiences = {
            (item.experience_id, item.revision): _from_turns(item, turns) for item in observed.all(Experience)
        }
        reports = [item for item in observed.all(TrainingMetrics) if item.account <= saved.account]
        digests = {batch.step: batch.digest for item in reports for batch in item.batches}
        return cls(settings, blobs, saved, experiences, _batches(reports, saved, experiences), digests)

    def policy(self) -> Policy:
        """The base, opened as the trainer opens it."""
        return Policy.open(Path(self.settings.base), self.settings.compute, self.settings.lora, self.settings.seed)

    def load(self, published: PublishedVersion, policy: Policy) -> dict[str, torch.Tensor]:
        """Make the weights of `policy` those in a version's files, and return them by parameter."""
        with versions.open_files(self.blobs, files.read_manifest(self.blobs, published.manifest).files) as folder:
            policy.load_files(folder)
        return policy.tensors()

    def batch(self, step: int, *, tampered: bool = False) -> Batch:
        """The step's batch, made of turns. `tampered`: with one sampled token exchanged for another."""
        rows = [Row.of(experience, advantage, None, weight) for experience, advantage, weight in self.batches[step]]
        if tampered:
            row = max(rows, key=lambda row_entry: abs(float(row_entry.advantage)))
            row.token_ids_T[np.flatnonzero(row.loss_mask_T)[-1]] ^= 1
        return Batch(tuple(rows), self.settings.batch_experiences)

    def train(self, policy: Policy, optimizer: Optimizer, batch: Batch) -> None:
        """One step, as the trainer takes it."""
        train(policy, optimizer, batch, self.settings.loss, policy.pack_tokens, threading.Event())

    def drift(self, policy: Policy, sampled_by: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """|logprob of the present weights - the engine's| of each trained token that `sampled_by` sampled."""
        trained = {
            (trained_experience.experience_id, trained_experience.revision): trained_experience
            for batch in self.batches.values()
            for trained_experience, *_ in batch
        }
        rows = [Row.of(trained_experience, 0.0, sampled_by) for trained_experience in trained.values()]
        drifts = []
        for row in (row for row in rows if row.fresh_T.any()):
            pack = policy.collate([row])
            with torch.no_grad():
                difference_N = (policy.logprobs(pack)[0] - pack.behaviour_N)[pack.fresh_N]
            drifts.append(difference_N.abs().double().numpy())
        return np.concatenate(drifts) if drifts else np.empty(0)


def _from_turns(experience: Experience, turns: Mapping[str, Turn]) -> Experience:
    """The experience with tokens, logprobs, versions and temperatures as the turns have them, none of its own."""
    trained = None if experience.branch is None else experience.branch.sampled
    if trained is None:
        return experience
    spans: list[Span] = []
    tokens: tuple[int, ...] = ()
    for span in trained.spans:
        turn = turns[span.turn_id]
        choice = turn.choices[span.choice]
        spans.append(
            Span(
                start=len(turn.prompt_token_ids), logprobs=choice.logprobs, turn_id=turn.turn_id, choice=span.choice,
                version=turn.version, temperature=turn.sampling.temperature, finish_reason=choice.finish_reason,
            )
        )  # fmt: skip
        assert turn.prompt_token_ids[: len(tokens)] == tokens, "a turn's prompt goes on with exactly its own tokens"
        tokens = turn.prompt_token_ids + choice.token_ids
    return experience.model_copy(update={"branch": Branch(token_ids=tokens, spans=tuple(spans))})


def _batches(
    reports: Iterable[TrainingMetrics], saved: SavedState, experiences: Mapping[tuple[str, int], Experience]
) -> dict[int, list[tuple[Experience, float, float | None]]]:
    """Verdicts are in the order of the batch; which step an experience was in, and with which advantage, is in the
    lineage's own window."""
    batches: dict[int, list[tuple[Experience, float, float | None]]] = defaultdict(list)
    times: dict[str, int] = defaultdict(int)
    unique = {metrics.account: metrics for metrics in reports}
    for _, report in sorted(unique.items()):
        for verdict in report.verdicts:
            if verdict.dropped is None:
                contribution = saved.window[verdict.experience_id].contributions[times[verdict.experience_id]]
                weight = contribution.token_weight if times[verdict.experience_id] else None
                times[verdict.experience_id] += 1
                experience = experiences[verdict.experience_id, verdict.revision]
                batches[contribution.step].append((experience, contribution.advantage, weight))
    return batches
