"""Check of the scorer's settings before its start: reward functions can be imported and have known parameters."""

from __future__ import annotations

from headrace_runtime.errors import SettingError
from headrace_runtime.settings.sections import Common
from headrace_scorer.functions.pool import FunctionPool
from headrace_scorer.functions.process import FunctionsRefused
from headrace_scorer.settings import ScorerSettings


async def check(_common: Common, settings: ScorerSettings) -> list[str]:
    """Load the functions in a process of their own, as a start does. Raises `SettingError` or `Unavailable`."""
    pool = FunctionPool(settings.model_copy(update={"function_workers": 1}))
    try:
        await pool.reload()
    except FunctionsRefused as error:
        raise SettingError("scorer.functions", settings.functions, str(error)) from None
    finally:
        await pool.close()
    return []
