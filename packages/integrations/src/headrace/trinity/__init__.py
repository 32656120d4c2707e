"""Trinity-RFT's workflow interface: public path of `headrace_integrations.trinity`."""

from headrace_integrations.trinity import *
from headrace_integrations.trinity import __all__ as __all__
