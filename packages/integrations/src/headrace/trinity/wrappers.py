"""Public path of the wrappers in `headrace_integrations.trinity.workflows`."""

from headrace_integrations.trinity.workflows import EID as EID
from headrace_integrations.trinity.workflows import FormatArgs as FormatArgs
from headrace_integrations.trinity.workflows import ModelWrapper as ModelWrapper
from headrace_integrations.trinity.workflows import TrinityExperience as TrinityExperience
from headrace_integrations.trinity.workflows import TrinityTask as TrinityTask
