"""Offline training jobs for programs, as `headrace train` runs them: public path of `headrace_operations.jobs`."""

from headrace_operations.jobs import *
from headrace_operations.jobs import __all__ as __all__
