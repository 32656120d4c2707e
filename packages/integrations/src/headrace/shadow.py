"""Training copies: public path of `headrace_integrations.shadow`."""

from headrace_integrations.shadow import *
from headrace_integrations.shadow import __all__ as __all__
