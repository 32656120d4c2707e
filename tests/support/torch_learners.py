"""Views of a lineage whose weights are in this process."""

from __future__ import annotations

from headrace_trainer.lineage.lineage import Lineage
from headrace_trainer.torch_learner.learner import TorchLearner
from headrace_trainer.torch_learner.model.policy import Policy
from headrace_trainer.torch_learner.optimizer import Optimizer


def torch_learner(lineage: Lineage | None) -> TorchLearner:
    """Return the learner of an open lineage with the back end `torch`."""
    assert lineage is not None
    assert isinstance(lineage.learner, TorchLearner)
    return lineage.learner


def policy_of(lineage: Lineage | None) -> Policy:
    """The model in training."""
    return torch_learner(lineage).policy


def optimizer_of(lineage: Lineage | None) -> Optimizer:
    """Return its optimizer."""
    return torch_learner(lineage).optimizer
