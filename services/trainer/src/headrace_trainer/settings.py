"""The section `[trainer]`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, SecretStr, model_validator

from headrace_runtime.errors import SettingError
from headrace_runtime.registries import NameIn, PluginError
from headrace_runtime.settings import Port, Section, ServiceSettings
from headrace_schemas.base import ModelName
from headrace_trainer.algorithms.needs import OFFERED, Needs
from headrace_trainer.algorithms.presets import ALGORITHMS
from headrace_trainer.algorithms.settings import AdvantageSettings, Count, LossSettings, NotNegative, Positive
from headrace_trainer.backends import BACKENDS, Backend
from headrace_trainer.service import INFO

_RATE_OF_SIZE, _RATE_MAX, _RATE_OF_ADAPTERS = 0.13, 1e-4, 10
"""Through 1.5e-6 at 7 billion parameters, as recipes for models of that size have it. Small models were measured: at
0.4 million, 2e-4 learns faster from a true reward, is ruined by one at random (docs/controls.md), and a correction of
its very first batch leaves more than it may (docs/algorithms.md)."""


class OptimizerSettings(Section):
    """AdamW, or Muon on the matrices with AdamW on the rest."""

    COMMON: ClassVar = ("learning_rate",)

    kind: Literal["adamw", "muon"] = "adamw"
    """`muon` orthogonalises the updates of the matrices between hidden layers; embeddings, the output head and all
    that is no matrix have AdamW. A correction then takes back only what AdamW did (docs/algorithms.md)."""
    learning_rate: Positive | None = None
    """After the warm-up. None: by the size of the model, 0.13 / √parameters and at most 1e-4, and ten times that for
    adapters; the log says what that is (docs/guides/sizing.md)."""
    warmup_updates: Annotated[int, Field(ge=0)] = 0
    """Updates over which the learning rate rises linearly."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW's first momentum."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.99
    """AdamW's second momentum; lower than in supervised training because rewards drift."""
    muon_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Muon's momentum."""
    weight_decay: NotNegative = 0.0
    """Decoupled decay of weights; 0 keeps a zero gradient a zero change."""
    gradient_norm_max: Positive = 1.0
    """Gradients are scaled down to this global norm."""

    @property
    def rate(self) -> float:
        """The learning rate, once there is a model whose size decides it (`of_size`)."""
        assert self.learning_rate is not None, "of_size has not been asked"
        return self.learning_rate

    def of_size(self, parameters: int, *, adapters: bool) -> OptimizerSettings:
        """These settings for a model of so many parameters, with a learning rate in any case."""
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
    """What matrix products run in; `auto` is bfloat16 on a device that multiplies it. What is trained is kept in
    float32 either way."""
    weights: Literal["float32", "bfloat16"] = "float32"
    """What the model holds where all weights are trained. `bfloat16`: weights as its versions have them, which the
    optimizer moves by way of float32 masters: 18 bytes a weight and not 16, half the activations, and the layers
    compute in the type that they are served in. Needs the dtype bfloat16. Adapters are float32 in any case, on frozen
    weights in `dtype`."""
    compile: bool = False
    """Fuse what a layer does between its products by torch.compile, on a GPU above all. Needs a C compiler; the first
    step waits for it, a minute and a half with a large model."""
    threads: Count = 1
    """Threads of a CPU step; the other services of a small machine need the rest."""
    packing: Literal["blocks", "padded"] = "blocks"
    """`blocks` joins sequences into one row and keeps their attention apart; `padded` is for models that cannot."""
    pack_tokens: Count = 4096
    """Tokens of one forward pass; a longer sequence runs alone. Lower it when memory runs out."""
    gradient_checkpointing: bool = False
    """Recompute the activations of each layer in the backward pass, all but its attention: slower, and far less memory
    for long sequences."""


class NativeSettings(Section):
    """The comparison at the start: our logprobs beside those of the model's own eager attention, one sequence at a
    time. A model that differs is refused."""

    tokens: Annotated[int, Field(ge=0)] = 8192
    """Tokens of the comparison. Its sequences reach beyond windows, chunks and original contexts as far as this allows;
    the log names what it does not. The model's own attention keeps a score for each pair of tokens of a sequence, for
    each head. 0 compares nothing, and the log says so."""
    difference_max: Positive = 1e-3
    """Largest difference in nats that is taken for rounding. With experts it holds for nine of ten tokens; for frozen
    weights in bfloat16 it is the mean that may be 100 times as large."""


class CriticSettings(Section):
    """The critic of `ppo`, and the advantages that are made with it."""

    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """What a reward counts one token earlier."""
    lam: Annotated[float, Field(ge=0, le=1)] = 1.0
    """How far advantages look beyond the next token: 1 compares a token's value with the run's reward, 0 with the next
    token's value alone."""
    learning_rate: Positive = 1e-3
    """Of the critic's own AdamW."""


class TeacherSettings(Section):
    """Whom `on_policy_distill` learns from."""

    model: str = ""
    """A model's folder with the token ids of `trainer.base`, or the address of an endpoint (`http://host:port`) that
    takes token ids and answers `prompt_logprobs`."""
    name: str = ""
    """What the endpoint calls the model."""
    key: SecretStr = SecretStr("")
    """Bearer token for the endpoint."""
    coefficient: Positive = 1.0
    """The advantage of a token that the teacher thinks more likely by one nat."""
    timeout_s: Positive = 60.0
    """How long the endpoint may take for one sequence."""
    attempts: Annotated[int, Field(ge=1, le=100)] = 5
    """Attempts at a sequence before the process ends, to be started again."""


class HealthSettings(Section):
    """Limits of training that goes well. A measure that stays beyond its limit stops training: the weights go back to
    the last version, and nothing is trained until somebody says so. 0 turns a limit off."""

    TIER: ClassVar[Literal["tuning", "limits"]] = "limits"

    patience_steps: Count = 3
    """Steps in a row beyond a limit that stop training. Until then no version is made of them."""
    entropy_min: NotNegative = 0.0
    """Least mean entropy of the sampled positions, in nats. Off by default: how sure an agent may be, its tasks say."""
    mismatch_max: NotNegative = 2.0
    """Largest mean difference between the engine's and the trainer's logprobs of the same weights, in nats. Rounding
    makes hundredths; beyond this the engine samples from something else."""
    effective_sample_min: Annotated[float, Field(ge=0, lt=1)] = 0.01
    """Least effective sample size of the importance weights, as a share of the tokens."""
    kl_base_max: NotNegative = 0.0
    """Largest divergence from the base, in nats a token. Needs `loss.kl` or `kl_base_interval_steps`."""
    kl_base_interval_steps: Annotated[int, Field(ge=0)] = 0
    """Steps between two measurements of that divergence, where `loss.kl` does not make one in each. One costs another
    forward pass over the batch, and the base is kept in memory unless adapters are trained. 0 measures nothing."""
    guard_drop_max: NotNegative = 0.05
    """Largest drop of what accepted answers are likely, in nats a token beneath the base, that is sure to 97.5 %
    (`hindsight`)."""
    gradient_spike_max: NotNegative = 100.0
    """Largest gradient norm, as a multiple of the running median. A gradient that is not finite is beyond it."""


class MemorySettings(Section):
    """Bounds on what is kept, in memory and in each checkpoint."""

    TIER: ClassVar[Literal["tuning", "limits"]] = "limits"

    queue_experiences: Annotated[int, Field(ge=1, le=16_384)] = 1024
    """Experiences that may wait for a batch; when it is full the bus is not read."""
    queue_tokens: Count = 1_000_000
    """Tokens of those experiences, whichever bound is reached first."""
    sequence_tokens: Annotated[int, Field(ge=2)] | None = None
    """Longer sequences are dropped as `too_long`; so are those beyond the model's own context and `queue_tokens`. None:
    what fits into the memory that is free at the start, which the log says as `sequence_bound`."""
    window_experiences: Count = 20_000
    """Experiences remembered to recognise duplicates and revisions. What could still change the weights stays
    longer."""
    window_age_s: Positive = 2_592_000.0
    """How long they are remembered; as long as the topic keeps them."""
    baseline_tasks: Count = 4096
    """Tasks with a baseline of their own; the one unused for longest makes room."""
    baseline_runs: Count = 1024
    """Runs whose share in the baselines is remembered: a branch that comes later is not compared with its own run."""
    examples: Count = 64
    """Examples that one experience may give: its branch, its edits, and its sides of preferences. With more it is
    dropped."""
    versions: Annotated[int, Field(ge=16)] = 512
    """Published versions whose experiences are recognised."""
    restore_points: Annotated[int, Field(ge=3)] = 6
    """Versions whose weights and optimizer are kept to go back to, champion and previous among them."""
    restore_points_bytes: Count | None = None
    """Bytes that these may take on the disk; the oldest go first. Those of base, newest version, champion and previous
    stay whatever they take. None: 1 GiB, or four times one of them where that is more."""
    outcomes: Annotated[int, Field(ge=1, le=16_384)] = 4096
    """Training outcomes, or ranges of records read, that may wait for the next save before they cause one."""


class TrainerSettings(ServiceSettings):
    """All of `[trainer]`."""

    COMMON: ClassVar = ("base", "model", "algorithm", "batch_experiences", "steps_per_version")

    port: Port = INFO.port
    """Port of `/health` and `/metrics`; 0 lets the system choose."""
    base: str = ""
    """A Hugging Face folder (safetensors, tokenizer, chat template): where a lineage starts. Required."""
    model: ModelName = "headrace"
    """The model that is trained; experiences of other models are passed over."""
    lineage: ModelName = "main"
    """Names this line of versions and its saved state. One process at a time may train a lineage."""
    topic: Annotated[str, Field(min_length=1)] = "experiences"
    """Where experiences come from; a replay names a copy of the usual topic."""
    replays: ModelName | None = None
    """A lineage whose experiences are trained again in this one: its versions count as ours of the same number."""
    cut: Literal["rules", "recorded"] = "rules"
    """When a batch is complete: by the settings below, or where the lineage that is trained again cut its own, which
    `headrace replay` marks in the copy of the topic; so batches that time had cut come out the same."""
    until_end: bool = False
    """Stop with status 0 once everything that `topic` held at the start has been read and trained."""
    announce_to: Annotated[str, Field(max_length=128)] = ""
    """Goes before the names of `checkpoints` and `training-metrics`: a replay keeps its versions from the registry."""
    seed: int = 0
    """Seeds what is drawn at random (the initial LoRA matrices)."""

    algorithm: Annotated[str, NameIn(ALGORITHMS)] = "reinforce++"
    """The kind of advantage, the loss, and what else goes with them; settings that are stated win over it. What each
    needs is in docs/algorithms.md."""
    backend: Annotated[str, NameIn(BACKENDS)] = "torch"
    """What holds weights and optimizer and takes the steps: `torch` in the trainer's process, on one device; `ray` in
    processes that share each step; `trinity` by Trinity-RFT (docs/scaling.md)."""
    batch_experiences: Count = 64
    """Experiences in a step. A batch of fewer, cut by time, is that much less than a step."""
    batch_experiences_min: Count = 8
    """Experiences with which a step is taken once `batch_wait_s` has passed; all of them where a batch is smaller."""
    batch_wait_s: Positive = 30.0
    """How long the first of a smaller batch waits for more. Batches that were cut by time depend on the clock."""
    group_size: Count = 8
    """Runs of one task that make a group (`grpo`, `rloo`)."""
    group_wait_s: Positive = 300.0
    """How long a group waits to be complete; then it is used as it is, and a single run is dropped."""
    pair_wait_s: Positive = 300.0
    """How long an answer waits for the one that it was compared with (`dpo`); then it is dropped as `unpaired`."""
    max_staleness: Annotated[int, Field(ge=0)] = 2
    """Versions that may lie between the one that sampled an experience and the one that is trained (P5)."""
    steps_per_version: Count = 3
    """Steps between two published versions."""
    max_steps: Count | None = None
    """Stop after this many steps in the lineage; none: go on for ever."""
    save_interval_s: Positive = 30.0
    """How long a training outcome may wait to be made durable and reported when no version is published."""
    save_beside: bool = False
    """Steps go on while a save is written. Weights and optimizer are copied to the host's memory first, which needs as
    much room there as a save has. For models whose saves take as long as steps."""
    retry_s: Positive = 60.0
    """How long bus or blob store may be away before the process gives up and is restarted."""
    lease_s: Positive = 10.0
    """Silence after which the process that trains this lineage is taken for dead and another one may take it over. The
    death of a process on the same machine is seen at once, and who is told to stop gives the lineage up."""
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
        return {name: one.settings for name, one in BACKENDS.all().items() if one.settings is not None}

    @property
    def needs_base(self) -> bool:
        """Whether the base's logprobs are asked for, at whatever interval."""
        measured = self.loss.kl > 0 or self.health.kl_base_interval_steps > 0
        return measured or self.needs.reference or self.needs.hindsight

    @property
    def needs(self) -> Needs:
        """What the kind of advantage and the loss cannot do without."""
        written = self.advantage.signals.written or self.advantage.signals.edits
        return self.advantage.estimator.needs | self.loss.function.needs | Needs(demonstrations=written)

    @property
    def grouped(self) -> bool:
        """Whether advantages compare the runs of a group."""
        return self.needs.groups

    def _check_backend(self, backend: Backend) -> None:
        """What is asked for that nobody has, or this back end has not."""
        offered = OFFERED | backend.offers
        if missing := self.needs.beyond(offered):
            raise SettingError(
                "trainer.algorithm",
                self.algorithm,
                f"advantages of kind {self.advantage.kind} and the loss {self.loss.kind} need {' and '.join(missing)}, "
                f"which the back end {self.backend} does not have; choose another one",
            )
        if self.needs_base and not offered.reference:
            raise SettingError(
                "trainer.backend",
                self.backend,
                "cannot ask the base: set loss.kl and health.kl_base_interval_steps to 0, or choose another one",
            )
        self._check_signals()
        if self.lora.rank and not backend.adapters:
            raise SettingError(
                "trainer.lora.rank", self.lora.rank, f"the back end {self.backend} trains no adapters; set 0"
            )

    def _check_signals(self) -> None:
        """Whether the kind of advantage gives what the loss takes."""
        signals, loss = self.advantage.signals, self.loss.function
        remedy = ""
        if loss.needs.pairs and not signals.paired:
            remedy = f'compares two answers, and advantages of kind {self.advantage.kind} train single ones; set "dpo"'
        elif loss.needs.logprobs and not loss.origins and (signals.written or signals.answers):
            remedy = (
                f"needs the engine's logprobs, which written tokens have not, and advantages of kind "
                f'{self.advantage.kind} train those; set "likelihood", or "mix" for both'
            )
        if remedy:
            raise SettingError("trainer.loss.kind", self.loss.kind, remedy)
        if self.needs.teacher and not self.teacher.model:
            remedy = f"{self.advantage.kind} learns from a teacher: name a model's folder or an endpoint"
            raise SettingError("trainer.teacher.model", self.teacher.model, remedy)

    @model_validator(mode="before")
    @classmethod
    def _algorithm_beneath(cls, table: Any) -> Any:
        if not isinstance(table, Mapping):
            return table
        name = table.get("algorithm", cls.model_fields["algorithm"].default)
        if not isinstance(name, str):
            return table
        try:
            return ALGORITHMS.get(name).under(table)
        except PluginError:
            return table  # the field itself says what is wrong with its name

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        """Raises `SettingError` with the one setting to change, so that the start stops before anything is loaded."""
        if not self.base:
            raise SettingError("trainer.base", self.base, "name a Hugging Face folder to start from")
        if self.owner_wait_s <= self.lease_s:
            raise SettingError(
                "trainer.owner_wait_s",
                self.owner_wait_s,
                "must be longer than lease_s",
            )
        if self.replays == self.lineage:
            raise SettingError("trainer.replays", self.replays, "is this lineage itself; name a new trainer.lineage")
        self._check_backend(BACKENDS.get(self.backend))
        if self.grouped and self.group_size < 2:
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
        needed = max(self.batch_experiences, self.group_size if self.grouped else 1)
        if self.memory.queue_experiences < needed:
            raise SettingError(
                "trainer.memory.queue_experiences", self.memory.queue_experiences, f"a batch needs {needed}"
            )
        if self.memory.queue_tokens < (self.memory.sequence_tokens or 0):
            raise SettingError(
                "trainer.memory.queue_tokens", self.memory.queue_tokens, "is less than memory.sequence_tokens"
            )
        return self
