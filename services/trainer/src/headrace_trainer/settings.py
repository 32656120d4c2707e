"""The section `[trainer]`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from headrace_runtime.errors import SettingError
from headrace_runtime.registries import NameIn, PluginError
from headrace_runtime.settings.sections import Port, Section, ServiceSettings
from headrace_runtime.settings.table import Fixed
from headrace_schemas.values.base import ModelName
from headrace_trainer import INFO
from headrace_trainer.algorithms.presets import ALGORITHMS, OFFERED, Needs
from headrace_trainer.algorithms.settings import (
    AdvantageSettings,
    Count,
    CriticSettings,
    LossSettings,
    NotNegative,
    Positive,
    TeacherSettings,
)
from headrace_trainer.backends import BACKENDS, Backend

_RATE_OF_SIZE, _RATE_MAX, _RATE_OF_ADAPTERS = 0.13, 1e-4, 10
"""The factor gives 1.5e-6 at 7 billion parameters, as in recipes for models of that size. At 0.4 million, 2e-4 learns
faster from a true reward, but a random one ruins it (docs/controls.md), and its first corrections leave too much."""


class OptimizerSettings(Section):
    """AdamW, or Muon on the matrices with AdamW on the rest."""

    COMMON: ClassVar = ("learning_rate",)
    PARAMETERS: ClassVar = ("beta1", "beta2")

    kind: Literal["adamw", "muon"] = "adamw"
    """`muon` orthogonalises the updates of the matrices between hidden layers; embeddings, the output head and all
    other tensors use AdamW. A correction then reverses only the part of AdamW (docs/algorithms.md)."""
    learning_rate: Positive | None = None
    """Learning rate after the warm-up. None: by the size of the model, 0.13 / √parameters and at most 1e-4, and ten
    times that for adapters; the log reports it (docs/guides/sizing.md)."""
    warmup_updates: Annotated[int, Field(ge=0)] = 0
    """Updates over which the learning rate rises linearly."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW's first momentum, as everywhere."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.99
    """AdamW's second momentum; lower than in supervised training because rewards drift."""
    weight_decay: NotNegative = 0.0
    """Decoupled decay of weights; 0 keeps a zero gradient a zero change."""
    gradient_norm_max: Positive = 1.0
    """Gradients are scaled down to this global norm."""

    @property
    def rate(self) -> float:
        """The learning rate. It must be set, or computed by `with_rate_for_size` before."""
        assert self.learning_rate is not None, "call of_size first"
        return self.learning_rate

    def with_rate_for_size(self, parameters: int, *, adapters: bool) -> OptimizerSettings:
        """Return these settings, with the default learning rate for a model of this size if none is set."""
        if self.learning_rate is not None:
            return self
        rate = min(_RATE_OF_SIZE / math.sqrt(parameters), _RATE_MAX) * (_RATE_OF_ADAPTERS if adapters else 1)
        return self.model_copy(update={"learning_rate": float(f"{rate:.2g}")})


class LoraSettings(Section):
    """Low-rank adapters instead of full training."""

    COMMON: ClassVar = ("rank",)

    rank: Annotated[int, Field(ge=0)] = 0
    """Rank of the adapters; 0 trains all weights."""
    alpha: Positive = 32.0
    """The adapters' output is scaled by alpha / rank."""
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Names of the modules that get adapters."""


class ComputeSettings(Section):
    """Where and how the model runs."""

    COMMON: ClassVar = ("device", "dtype")

    device: str = "auto"
    """`auto` is the first GPU when there is one; or `cpu`, `cuda`, `cuda:1`."""
    dtype: Literal["float32", "bfloat16", "auto"] = "float32"
    """Type of matrix products; `auto` is bfloat16 on a device that supports it. Trained weights are stored in float32
    in either case."""
    weights: Literal["float32", "bfloat16"] = "float32"
    """Type of the model's weights where all weights are trained. `bfloat16`: weights as in its versions, which the
    optimizer moves by way of float32 masters: 18 bytes a weight and not 16, half the activations, and the layers
    compute in the type that they are served in. Needs the dtype bfloat16. Adapters are float32 in any case, on frozen
    weights in `dtype`."""
    compile: bool = False
    """Fuse the operations between a layer's matrix products by torch.compile, mainly on a GPU. Needs a C compiler; the
    first step waits for it, a minute and a half with a large model."""
    threads: Count = 1
    """Threads of a CPU step; the other services of a small machine need the rest."""
    packing: Literal["blocks", "padded"] = "blocks"
    """`blocks` joins sequences into one row and separates their attention; `padded` is for models that cannot do
    that."""
    pack_tokens: Count | None = None
    """Tokens of one forward pass; a longer sequence runs alone. None: 4096, and on a CPU fewer for a large model, at
    least 512, so that the activations of a pass take 2 GiB at most (docs/guides/sizing.md). Lower it when memory runs
    out."""
    gradient_checkpointing: bool = False
    """Recompute the activations of each layer in the backward pass, all but its attention: slower, and far less memory
    for long sequences."""


class NativeSettings(Section):
    """Check at the start that the trainer computes the same logprobs as the model's own code with eager attention.
    Training does not start for a model that differs.
    """

    PARAMETERS: ClassVar = ("difference_max",)

    tokens: Annotated[int, Field(ge=0)] = 8192
    """Tokens of the comparison. Its sequences reach beyond windows, chunks and original contexts as far as this allows;
    the log names the parts that are not reached. The model's own attention stores a score for each pair of tokens of a
    sequence, for each head. 0 skips the comparison, and the log reports it."""
    difference_max: Positive = 1e-3
    """Largest difference in nats that counts as rounding. With experts it applies to nine of ten tokens; with frozen
    weights in bfloat16 the mean may be 100 times as large."""


class HealthSettings(Section):
    """Limits of healthy training. A measure that stays beyond its limit stops training: the weights go back to the last
    version, and training waits until an operator resumes it. 0 turns a limit off."""

    TIER: ClassVar[Literal["tuning", "limits"]] = "limits"

    patience_steps: Count = 3
    """Steps in a row beyond a limit that stop training. Until then no version is made of them."""
    entropy_min: NotNegative = 0.0
    """Least mean entropy of the sampled positions, in nats. Off by default, because the right value depends on the
    tasks."""
    mismatch_max: NotNegative = 2.0
    """Largest mean difference between the engine's and the trainer's logprobs of the same weights, in nats. Rounding
    causes hundredths; beyond this the engine must use other weights or another distribution."""
    effective_sample_min: Annotated[float, Field(ge=0, lt=1)] = 0.01
    """Least effective sample size of the importance weights, as a share of the tokens."""
    kl_base_max: NotNegative = 0.0
    """Largest divergence from the base, in nats a token. Needs `loss.kl` or `kl_base_interval_steps`."""
    kl_base_interval_steps: Annotated[int, Field(ge=0)] = 0
    """Steps between two measurements of that divergence, where `loss.kl` does not measure it in each. One costs another
    forward pass over the batch, and the base is kept in memory unless adapters are trained. 0 measures nothing."""
    guard_drop_max: NotNegative = 0.05
    """Largest drop of the mean logprob of accepted answers below the base, in nats a token, at a confidence of 97.5 %
    (`hindsight`)."""
    gradient_spike_max: NotNegative = 100.0
    """Largest gradient norm, as a multiple of the running median. A gradient that is not finite is beyond it."""


class MemorySettings(Section):
    """Bounds on stored state, in memory and in each checkpoint."""

    TIER: ClassVar[Literal["tuning", "limits"]] = "limits"
    FIXED: ClassVar = {"outcomes": Fixed(4096)}
    PARAMETERS: ClassVar = ("examples", "queue_tokens")

    queue_experiences: Annotated[int, Field(ge=1, le=16_384)] = 1024
    """Experiences that may wait for a batch; when it is full the bus is not read."""
    queue_tokens: Count = 1_000_000
    """Tokens of those experiences, whichever bound is reached first. It bounds the memory of the
    queue and the size of a save."""
    sequence_tokens: Annotated[int, Field(ge=2)] | None = None
    """Longer sequences are dropped as `too_long`; so are those beyond the model's own context and a million tokens.
    None: as many tokens as fit into the free memory at the start, which the log reports as `sequence_bound`."""
    window_experiences: Count = 20_000
    """Experiences remembered to recognise duplicates and revisions. Entries that could still change the weights stay
    longer."""
    examples: Count = 64
    """Largest number of examples of one experience: its branch, its edits, and its sides of preferences. With more it
    is dropped."""
    restore_points: Annotated[int, Field(ge=3)] = 6
    """Versions whose weights and optimizer are kept to go back to, base, newest version and champions among them."""
    restore_points_bytes: Count | None = None
    """Bytes that these may take on the disk. The oldest are removed first, champions' last, those of base and newest
    version never. None: 1 GiB, or the size of one if that is more. A version without one restarts the optimizer."""


class TrainerSettings(ServiceSettings):
    """All of `[trainer]`."""

    COMMON: ClassVar = ("base", "model", "algorithm", "batch_experiences", "steps_per_version")
    FIXED: ClassVar = {"pair_wait_s": Fixed(300.0, "set trainer.group_wait_s")}
    PARAMETERS: ClassVar = ("announce_to", "cut", "replays", "topic", "until_end")
    SHARED: ClassVar = ("host", "lease_s", "retry_s")

    port: Port = INFO.port
    """Port of `/health` and `/metrics`; 0 lets the system choose."""
    base: str = ""
    """Where a lineage starts: a Hugging Face folder, a model of the hub (`org/name` or `org/name@revision`), a GGUF
    file, or one of an installed package (`package:NAME/PATH`). Required."""
    model: ModelName = "headrace"
    """The model that is trained; experiences of other models are skipped."""
    lineage: ModelName = "main"
    """Name of this line of versions and of its saved state. One process at a time may train a lineage."""
    job: dict[Literal["announce_to", "cut", "replays", "topic", "until_end"], str | bool] = Field(default={})
    """The run of a command such as `headrace replay run` or `headrace train`, which sets this: topic of the
    experiences, lineage that is replayed, where batches are cut, whether to stop at the end of the topic, and the
    prefix of the topics of reports."""
    topic: Annotated[str, Field(min_length=1)] = "experiences"
    """Topic of the experiences; a replay names a copy of the usual topic."""
    replays: ModelName | None = None
    """A lineage whose experiences are trained again in this one: its versions count as this lineage's of the same
    number."""
    cut: Literal["rules", "recorded"] = "rules"
    """When a batch is complete: by the settings below, or where the replayed lineage cut its own batches, which
    `headrace replay` marks in the copy of the topic; so batches that were cut by time are the same."""
    until_end: bool = False
    """Stop with status 0 once all records that `topic` held at the start have been read and trained."""
    announce_to: Annotated[str, Field(max_length=128)] = ""
    """Prefix of the topics `checkpoints` and `training-metrics`, so that the versions of a replay do not reach the
    registry."""
    seed: int = 0
    """Seed of random numbers (the initial LoRA matrices)."""

    algorithm: Annotated[str, NameIn(ALGORITHMS)] = "reinforce++"
    """Preset of the kind of advantage, the loss, and other settings; explicit settings take precedence. The needs of
    each algorithm are in docs/algorithms.md."""
    backend: Annotated[str, NameIn(BACKENDS)] = "torch"
    """Learner that holds weights and optimizer and takes the steps: `torch` in the trainer's process, on one device;
    `ray` in processes that share each step; `trinity` by Trinity-RFT (docs/scaling.md)."""
    batch_experiences: Count = 64
    """Experiences in a step. A smaller batch, cut by time, counts as a fraction of a step."""
    batch_experiences_min: Count = 8
    """Experiences with which a step is taken once `batch_wait_s` has passed; at most `batch_experiences`."""
    batch_wait_s: Positive = 30.0
    """How long the first of a smaller batch waits for more. Batches that were cut by time depend on the clock."""
    group_size: Count = 8
    """Runs of one task that make a group (`grpo`, `rloo`)."""
    group_wait_s: Positive = 300.0
    """How long a group waits for missing runs; then it is trained without them, and a single run is dropped. An answer
    waits as long for the one that it was compared with (`dpo`); then it is dropped as `unpaired`."""
    max_staleness: Annotated[int, Field(ge=0)] = 2
    """Versions that may lie between the one that sampled an experience and the one that is trained."""
    steps_per_version: Count = 3
    """Steps between two published versions."""
    max_steps: Count | None = None
    """Stop after this many steps in the lineage; none: without a limit."""
    save_interval_s: Positive | None = None
    """How long a training outcome may wait to be made durable and reported when no version is published. None: 30 s;
    after a step, a second for each megabyte of weights and optimizer if that is more, and half an hour at most."""
    save_beside: bool = False
    """Continue with steps while a save is written. Weights and optimizer are copied to the host's memory first, which
    needs as much room there as a save has; otherwise a save needs none. For models whose saves take as long as
    steps."""
    retry_s: Positive = 60.0
    """How long bus or blob store may be unavailable before the process ends and is restarted."""
    lease_s: Positive = 10.0
    """Silence after which the process that trains this lineage counts as dead and another one may take it over. The
    death of a process on the same machine is noticed at once, and a process that is stopped releases the lineage."""
    owner_wait_s: Positive = 60.0
    """How long to stand by while another process trains this lineage, as the old one does in a rolling restart."""

    advantage: AdvantageSettings = AdvantageSettings()
    loss: LossSettings = LossSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    lora: LoraSettings = LoraSettings()
    compute: ComputeSettings = ComputeSettings()
    native: NativeSettings = NativeSettings()
    critic: CriticSettings = CriticSettings()
    teacher: TeacherSettings = TeacherSettings()
    health: HealthSettings = HealthSettings()
    memory: MemorySettings = MemorySettings()

    @classmethod
    def announced(cls) -> dict[str, type[Section]]:
        return {name: backend.settings for name, backend in BACKENDS.all().items() if backend.settings is not None}

    @property
    def needs_base(self) -> bool:
        """Whether training needs logprobs under the base model, for the loss or to measure the divergence from it."""
        measured = self.loss.kl > 0 or self.health.kl_base_interval_steps > 0
        return measured or self.needs.reference or self.needs.hindsight

    @property
    def needs(self) -> Needs:
        """Abilities that the configured advantage estimator and loss require of the learner, for example groups of
        runs, demonstrations, or logprobs under the base model.
        """
        written = self.advantage.signals.written or self.advantage.signals.edits
        return self.advantage.estimator.needs | self.loss.needs | Needs(demonstrations=written)

    @property
    def compares_groups(self) -> bool:
        """Whether advantages compare the runs of a group."""
        return self.needs.groups

    def _check_backend(self, backend: Backend) -> None:
        """Raise `SettingError` if the algorithm has needs that neither the trainer nor this back end meets."""
        offered = OFFERED | backend.offers
        if unmet := self.needs.missing_from(offered):
            raise SettingError(
                "trainer.algorithm",
                self.algorithm,
                f"advantages of kind {self.advantage.kind} and the loss {self.loss.kind} need {' and '.join(unmet)}, "
                f"which the back end {self.backend} does not have; choose another back end or algorithm",
            )
        if self.needs_base and not offered.reference:
            raise SettingError(
                "trainer.backend",
                self.backend,
                "cannot compute logprobs of the base: set loss.kl and health.kl_base_interval_steps to 0, or choose "
                "another back end",
            )
        self._check_signals()
        if self.lora.rank and not backend.adapters:
            raise SettingError(
                "trainer.lora.rank", self.lora.rank, f"the back end {self.backend} trains no adapters; set 0"
            )

    def _check_signals(self) -> None:
        """Raise `SettingError` when a function of the kind of advantage would never be called, or when the loss needs
        other examples than the kind trains."""
        signals, loss = self.advantage.signals, self.loss.function
        mistake = self.advantage.estimator.find_mistake(signals, hindsight=self.needs.hindsight)
        if mistake is not None:
            raise SettingError("trainer.advantage.kind", self.advantage.kind, mistake)
        remedy = ""
        if loss.needs.pairs and not signals.paired:
            remedy = f'compares two answers, and advantages of kind {self.advantage.kind} train single ones; set "dpo"'
        elif loss.needs.logprobs and not loss.origins and (signals.written or signals.answers):
            remedy = (
                f"needs the engine's logprobs, which written tokens lack, and advantages of kind "
                f'{self.advantage.kind} train written tokens; set "likelihood", or "mix" for both'
            )
        if remedy:
            raise SettingError("trainer.loss.kind", self.loss.kind, remedy)
        if self.loss.kl_needs_logprobs and not loss.origins and (signals.written or signals.answers):
            remedy = "needs the engine's logprobs, which written tokens lack; set another estimate"
            raise SettingError("trainer.loss.kl_kind", self.loss.kl_kind, remedy)
        if self.needs.teacher and not self.teacher.model:
            remedy = f"{self.advantage.kind} learns from a teacher: name a model's folder or an endpoint"
            raise SettingError("trainer.teacher.model", self.teacher.model, remedy)

    @model_validator(mode="before")
    @classmethod
    def _apply_algorithm_defaults(cls, table: Any) -> Any:
        if not isinstance(table, Mapping):
            return table
        if isinstance(job := table.get("job"), Mapping):
            table = {**table, **job}
        name = table.get("algorithm", cls.model_fields["algorithm"].default)
        if not isinstance(name, str):
            return table
        try:
            return ALGORITHMS.get(name).merge_settings(table)
        except PluginError:
            return table  # the validation of the field reports the wrong name

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        """Raise `SettingError` for a setting that does not fit the others, so that the start stops before loading a
        model."""
        if not self.base:
            raise SettingError("trainer.base", self.base, "name a folder, or a model of the hub as org/name")
        if self.owner_wait_s <= self.lease_s:
            raise SettingError("trainer.owner_wait_s", self.owner_wait_s, "must be longer than lease_s")
        if self.replays == self.lineage:
            raise SettingError("trainer.replays", self.replays, "is this lineage itself; name a new trainer.lineage")
        self._check_backend(BACKENDS.get(self.backend))
        if self.compares_groups and self.group_size < 2:
            raise SettingError(
                "trainer.group_size",
                self.group_size,
                f"{self.advantage.kind} compares runs of one task and learns nothing from a single one: "
                'set at least 2, or algorithm = "reinforce++", which has a rolling baseline',
            )
        if self.health.kl_base_max and not self.needs_base:
            raise SettingError(
                "trainer.health.kl_base_max",
                self.health.kl_base_max,
                "nothing measures the divergence from the base: set trainer.health.kl_base_interval_steps",
            )
        if "batch_experiences_min" in self.model_fields_set and self.batch_experiences_min > self.batch_experiences:
            raise SettingError(
                "trainer.batch_experiences_min", self.batch_experiences_min, "is more than batch_experiences"
            )
        needed = max(self.batch_experiences, self.group_size if self.compares_groups else 1)
        if self.memory.queue_experiences < needed:
            remedy = f"a batch needs {needed}"
            raise SettingError("trainer.memory.queue_experiences", self.memory.queue_experiences, remedy)
        if self.memory.queue_tokens < (self.memory.sequence_tokens or 0):
            remedy = f"at most {self.memory.queue_tokens} tokens wait; set less"
            raise SettingError("trainer.memory.sequence_tokens", self.memory.sequence_tokens, remedy)
        return self
