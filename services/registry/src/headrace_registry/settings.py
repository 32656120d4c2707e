"""The section `[registry]`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from headrace_runtime.settings import Port, Section, ServiceSettings

Positive = Annotated[float, Field(gt=0)]


class GateSettings(Section):
    """The held-out evaluation that a candidate has to pass."""

    command: tuple[str, ...] = ()
    """Program and arguments that play the held-out tasks; empty: a candidate is promoted once probed. `{model}` becomes
    the exact version, `{base_url}` the gateway's URL, `{python}` the interpreter that runs the registry. It prints a
    line `{"task": "name", "score": 0..1}` for each task (a task played several times counts with its mean), nothing
    else on stdout, and exits with 0."""
    base_url: str = "http://127.0.0.1:8000/v1"
    """What `{base_url}` becomes; `headrace up` fills in the gateway that it started."""
    margin: Annotated[float, Field(ge=0, le=1)] = 0.05
    """How much lower than the champion's a candidate's mean score may be (non-inferiority)."""
    minimum_score: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Mean score below which a candidate is rejected whatever the champion has."""
    timeout_s: Positive = 600.0
    """How long one run may take before it is killed and counts as failed."""
    attempts: Annotated[int, Field(ge=1)] = 2
    """How often a run that failed (exit status, time-out, wrong output) is tried before the candidate is rejected."""
    output_bytes_max: Annotated[int, Field(ge=1024)] = 4_194_304
    """Output beyond this counts as a failed run."""


class RegistrySettings(ServiceSettings):
    """All of `[registry]`."""

    port: Port = 8020
    """Port of the REST interface; 0 lets the system choose."""
    gate: GateSettings = GateSettings()
    probe_timeout_s: Positive = 180.0
    """How long live replicas may take to load and probe a candidate before it is rejected."""
    lease_s: Annotated[float, Field(ge=1)] = 10.0
    """How long a leader that fell silent keeps its place; a standby registry takes over after that."""
    poll_s: Positive = 1.0
    """How often deadlines are looked at; events and requests are acted on at once."""
    reconcile_s: Positive = 5.0
    """How long the bus may show another routing than the database before it is published again."""
    retry_s: Positive = 60.0
    """How long bus or database may be away before the process gives up and is restarted."""
