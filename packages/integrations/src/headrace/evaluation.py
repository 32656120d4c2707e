"""Evaluation of one version on held-out tasks: public path of `headrace_integrations.evaluation`."""

from headrace_integrations.evaluation import *
from headrace_integrations.evaluation import __all__ as __all__
