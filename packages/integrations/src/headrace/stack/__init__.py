"""Attachment to a Headrace: public path of `headrace_integrations.stack`."""

from headrace_integrations.stack import *
from headrace_integrations.stack import __all__ as __all__
