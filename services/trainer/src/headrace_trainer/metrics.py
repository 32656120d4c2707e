"""The trainer's metrics; the shared ones are in `headrace_runtime.metrics`."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram, Info

ALGORITHM = Info(
    "headrace_trainer_algorithm", "Names of the algorithm, the kind of advantage, the loss and the back end"
)
WAITING = Gauge("headrace_trainer_waiting_experiences", "Admitted experiences that wait for a batch")
WAITING_TOKENS = Gauge("headrace_trainer_waiting_tokens", "Tokens of the waiting experiences")
TRAINED = Counter("headrace_trainer_trained_total", "Experience revisions that changed the weights")
DROPPED = Counter("headrace_trainer_dropped_total", "Experience revisions that were not trained, by reason", ["reason"])
UNDONE = Counter(
    "headrace_trainer_undone_total",
    "Trained revisions undone with a refused version, by whether they wait again",
    ["queued"],
)
DUPLICATES = Counter("headrace_trainer_duplicates_total", "Redelivered revisions, which get no second outcome")
OTHER_MODELS = Counter("headrace_trainer_other_models_total", "Experiences of models that this trainer does not train")
STEPS = Gauge("headrace_trainer_steps", "Steps in the life of the lineage")
VERSION_NUMBER = Gauge("headrace_trainer_version_number", "Number of the last version, 0 for the base")
REWINDS = Counter("headrace_trainer_rewinds_total", "Times the weights went back to another version")
STOPPED = Gauge("headrace_trainer_stopped", "1 while training is stopped because a limit of its health was passed")
NOT_FINITE = Counter("headrace_trainer_not_finite_total", "Batches dropped because their gradient was not finite")
UNCORRECTABLE = Counter(
    "headrace_trainer_uncorrectable_total", "Withdrawals after training whose tokens the bus no longer had"
)
EXPIRED = Counter("headrace_trainer_expired_records_total", "Records that the bus deleted before they were read")
STEP_SECONDS = Histogram(
    "headrace_trainer_step_seconds",
    "Duration of a training step",
    buckets=(0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000),
)
SAVE_SECONDS = Histogram(
    "headrace_trainer_save_seconds", "Duration of a save", buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
)
MEASURES = Gauge("headrace_trainer_measure", "The last step's measurements", ["measure"])
