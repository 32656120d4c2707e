"""The sections `[trainer.advantage]` and `[trainer.loss]`."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field, SecretStr

from headrace_runtime.registries import NameIn
from headrace_runtime.settings.sections import Section
from headrace_runtime.settings.table import Fixed
from headrace_trainer.algorithms.estimators import ESTIMATORS, Estimator
from headrace_trainer.algorithms.losses import LOSSES, Loss
from headrace_trainer.algorithms.presets import Needs, Signals
from headrace_trainer.algorithms.reward_ranges import RangeLimits

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(gt=0, lt=1)]
Count = Annotated[int, Field(ge=1)]


class AdvantageSettings(Section):
    """Settings of the computation of advantages from rewards; the formulas are in docs/algorithms.md."""

    FIXED: ClassVar = {
        "demonstrations": Fixed(False, 'set trainer.algorithm = "mix"'),
        "equal_groups": Fixed("train", 'set trainer.algorithm = "dapo"'),
    }
    PARAMETERS: ClassVar = ("demonstrations", "equal_groups", "limit", "model_decay")

    kind: Annotated[str, NameIn(ESTIMATORS)] = "reinforce++"
    """Set by `algorithm` unless it is set here. `reinforce++` compares a run with a rolling baseline and works on
    single runs; `grpo` and `rloo` compare the runs of one group and need several runs of each task."""
    task_decay: Share = 0.9
    """Weight that a run's reward keeps in its task's baseline after one more run of the task."""
    model_decay: Share = 0.99
    """The same for the baseline and the scale that all tasks share: about the last hundred runs."""
    scale: Literal["std", "none"] = "std"
    """Divide by the running standard deviation (`grpo`: the group's), or leave rewards in their own unit."""
    scale_min: NotNegative = 0.01
    """Lower bound on the standard deviation, in the unit of rewards: differences below it are a judge's noise and get
    no full advantage."""
    stray_factor: Annotated[float, Field(ge=0)] = 6.0
    """A value of a source is a stray in another unit if its distance from the median of the source's last 128 values is
    more than this many times their usual largest distance. It counts as the largest (or least) usual value, and
    `headrace status` names it. 0 lets all values count in full."""
    equal_groups: Literal["train", "drop"] = "train"
    """Whether a group whose runs all have the same reward is trained, with advantages of 0 and a part in the mean over
    tokens, or dropped with `equal_rewards` (`dapo`)."""
    demonstrations: bool = False
    """Train written experiences and edits in addition to the signals of `kind` (`mix`)."""
    limit: Positive = 10.0
    """Bound on advantages: they are clipped to plus and minus this, so that a surprise after long monotony is
    bounded."""

    @property
    def estimator(self) -> Estimator:
        """The estimator that `kind` names."""
        return ESTIMATORS.get(self.kind)

    @property
    def range_limits(self) -> RangeLimits:
        """Limits beyond which a reward is an outlier (`algorithms.reward_ranges`)."""
        return RangeLimits(self.stray_factor, self.scale_min)

    @property
    def signals(self) -> Signals:
        """Parts of an experience that the algorithm trains, such as its reward or its edits."""
        signals = self.estimator.signals
        return replace(signals, written=True, edits=True) if self.demonstrations else signals

    @classmethod
    def announced(cls) -> dict[str, type[Section]]:
        return {name: kind.settings for name, kind in ESTIMATORS.all().items() if kind.settings is not None}


class LossSettings(Section):
    """Settings of the loss; the formulas are in docs/algorithms.md."""

    PARAMETERS: ClassVar = ("horizon_tokens",)

    kind: Annotated[str, NameIn(LOSSES)] = "clipped"
    """Set by `algorithm` unless it is set here. `clipped` is the clipped, importance-weighted policy gradient."""
    clip_low: Share = 0.2
    """The ratio is clipped below at `1 - clip_low`."""
    clip_high: Positive = 0.28
    """The ratio is clipped above at `1 + clip_high`."""
    clip_dual: Annotated[float, Field(gt=1)] | None = None
    """Bound on the ratio where the advantage is negative (dual clip), none by default."""
    proximal: Literal["step", "behaviour"] = "step"
    """Denominator of the ratio: the weights at the start of the step, with a truncated importance weight between engine
    and weights (decoupled), or the engine's own logprobs (classical PPO)."""
    weight_max: Annotated[float, Field(ge=1)] = 2.0
    """Upper bound of importance weights."""
    mask_low: NotNegative = 0.0
    """Tokens whose probability has fallen below this share of the sampling engine's give no gradient."""
    mask_high: Annotated[float, Field(gt=1)] = 1e4
    """Tokens whose probability has grown beyond this multiple of the sampling engine's give no gradient."""
    sequence_mask_max: NotNegative = 0.0
    """An experience is left out of the loss when the mean log ratio of its tokens, between the weights and the sampling
    engine, is beyond plus or minus this. In nats; 0 leaves none out."""
    kl: NotNegative = 0.0
    """Coefficient of the divergence from the base model; above 0 the base is kept in memory too."""
    kl_kind: Literal["k1", "k2", "k3", "low_var_kl", "abs", "corrected_k3"] = "k3"
    """How a token's divergence from the base is estimated; `low_var_kl` is k3 within plus and minus 10."""
    agg_mode: Literal[
        "token-mean",
        "seq-mean-token-sum",
        "seq-mean-token-mean",
        "seq-mean-token-sum-norm",
        "token-mean-by-origin",
    ] = "token-mean"
    """How the losses of tokens are aggregated: by their mean over the batch; by the mean over sequences of their sum,
    of their mean, or of their sum over `horizon_tokens`; or by the mean of sampled tokens plus that of written ones."""
    horizon_tokens: Count = 1024
    """Divisor of a sequence's sum with `seq-mean-token-sum-norm`, whatever the sequence's length is. It scales all
    gradients alike, which AdamW does not notice."""
    updates_per_step: Count = 1
    """Optimizer updates on one batch; above 1 the clip bounds their total effect."""

    @property
    def kl_needs_logprobs(self) -> bool:
        """Whether the estimate of the divergence needs the engine's logprobs."""
        return self.kl > 0 and self.kl_kind == "corrected_k3"

    @property
    def needs(self) -> Needs:
        """The requirements of the loss and of the divergence from the base, such as logprobs or a reference model."""
        return self.function.needs | Needs(logprobs=self.kl_needs_logprobs)

    @property
    def function(self) -> Loss:
        """The loss that `kind` names."""
        return LOSSES.get(self.kind)

    @classmethod
    def announced(cls) -> dict[str, type[Section]]:
        return {name: loss.settings for name, loss in LOSSES.all().items() if loss.settings is not None}


class CriticSettings(Section):
    """Settings of the critic of `ppo` and of the advantages that are computed with it."""

    PARAMETERS: ClassVar = ("gamma", "lam")

    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount of a reward per token. 1: a run has one reward, which all of its tokens earned."""
    lam: Annotated[float, Field(ge=0, le=1)] = 1.0
    """How far advantages look beyond the next token: 1 compares a token's value with the run's reward, 0 with the next
    token's value alone. 1, because the critic is not trained beforehand."""
    learning_rate: Positive = 1e-3
    """Learning rate of the critic's own AdamW."""


class TeacherSettings(Section):
    """Teacher of the algorithm `on_policy_distill`: another model whose logprobs grade each token."""

    PARAMETERS: ClassVar = ("coefficient", "timeout_s")

    model: str = ""
    """A model's folder with the token ids of `trainer.base`, or the address of an endpoint (`http://host:port`) that
    takes token ids and answers `prompt_logprobs`."""
    name: str = ""
    """Name of the model at the endpoint."""
    key: SecretStr = SecretStr("")
    """Bearer token for the endpoint."""
    coefficient: Positive = 1.0
    """The advantage of a token to which the teacher gives one more nat of logprob: the unit, as the learning rate
    scales it."""
    timeout_s: Positive = 60.0
    """How long the endpoint may take for one sequence: a forward pass of the longest context on a slow machine."""
