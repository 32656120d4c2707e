"""Environment variables of users' programs: gates, tools, reward functions, agents, other trainers.

Such a program gets only the variables that every program needs and those that a setting names. An allowlist cannot leak
an unknown secret, in contrast to a list of secrets.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Annotated

from pydantic import Field

VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=256)]
"""Name of an environment variable, for settings that pass variables on."""

_SYSTEM = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "COLUMNS", "TZ", "TMPDIR", "TEMP", "TMP",
    "XDG_CACHE_HOME", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "SSL_CERT_FILE", "SSL_CERT_DIR",
)  # fmt: skip
_LANGUAGE = (
    "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "LC_COLLATE", "LC_MESSAGES", "LC_MONETARY", "LC_NUMERIC", "LC_TIME",
)  # fmt: skip
_PYTHON = (
    "PYTHONPATH", "PYTHONHOME", "PYTHONUTF8", "PYTHONIOENCODING", "PYTHONUNBUFFERED", "PYTHONHASHSEED",
    "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "PYTHONNOUSERSITE", "PYTHONUSERBASE", "PYTHONSAFEPATH",
    "PYTHONWARNINGS", "PYTHONFAULTHANDLER", "PYTHONOPTIMIZE", "PYTHONDEVMODE",
)  # fmt: skip
_COMPUTE = (
    "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "CUDA_HOME",
    "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME",
    "NCCL_DEBUG", "NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE",
    "TRANSFORMERS_OFFLINE", "TOKENIZERS_PARALLELISM", "RAY_ADDRESS",
)  # fmt: skip
INHERITED = frozenset((*_SYSTEM, *_LANGUAGE, *_PYTHON, *_COMPUTE))
"""Names of the variables that every user's program inherits."""


def program_environment(
    passed_on: Iterable[str] = (),
    *,
    more: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the environment for a user's program.

    Args:
        passed_on: Names of further variables that the program inherits.
        more: Additional variables with their values.
        environ: The variables from which the program inherits, by default those of this process.
    """
    environ = os.environ if environ is None else environ
    names = INHERITED.union(passed_on)
    return {**{name: value for name, value in environ.items() if name in names}, **(more or {})}
