"""The section `[registry]`."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, field_validator

from headrace_registry.rollouts.settings import RolloutSettings
from headrace_registry.service import INFO
from headrace_runtime.program_environment import VariableName
from headrace_runtime.settings import Port, Section, ServiceSettings

Positive = Annotated[float, Field(gt=0)]
Probability = Annotated[float, Field(gt=0, le=0.5)]
Margin = Annotated[float, Field(gt=0, le=1)]


class GateRaySettings(Section):
    """Copies of the gate's program on the machines of a Ray cluster, which share the plays."""

    workers: Annotated[int, Field(ge=0, le=1024)] = 0
    """Copies of the program; 0: one, on the registry's machine. Needs headrace-registry[ray] here and on the cluster's
    machines, with the same Python, and the program's files under the same path."""
    address: Annotated[str, Field(min_length=1)] = "auto"
    """The cluster, as `host:port` of its head, or `auto` for the one that this machine is part of. `gate.base_url` has
    to lead to the gateway from its machines."""
    cpus: Annotated[float, Field(ge=0, le=1024)] = 1.0
    """What each copy takes of the cluster's CPUs; where there is no room for all of them, the run fails."""
    environment: tuple[VariableName, ...] = ()
    """Environment variables of the registry that the copies get besides those of `gate.environment`."""


class GateSettings(Section):
    """The held-out evaluation that a candidate has to pass: a sequential paired test, see `docs/gate.md`."""

    COMMON: ClassVar = ("command", "margin", "tasks_max", "audit_tasks")

    command: tuple[str, ...] = ()
    """Program and arguments that play held-out tasks; empty: a candidate is promoted once probed. `{base_url}`
    becomes the gateway's URL, `{python}` the interpreter that runs the registry. It prints the names of its tasks in
    a line `{"gate": [...], "audit": [...]}`, then reads lines `{"version": ..., "task": ..., "seed": ...}` and
    answers each with a line that adds `"score": 0..1`, until its standard input ends."""
    base_url: str = "http://127.0.0.1:8000/v1"
    """What `{base_url}` becomes; `headrace up` fills in the gateway that it started."""
    environment: tuple[VariableName, ...] = ()
    """Environment variables of the registry that the program gets besides the system's own (`PATH`, `HOME`, `LANG`,
    `TZ`, those of Python and of the processors), for example `OPENAI_API_KEY` where the gateway asks for a key."""
    margin: Margin = 0.1
    """A version whose mean score is this much below the champion's is promoted with probability `alpha` at most."""
    anchor_margin: Margin = 0.05
    """A version whose mean score is this much below the anchor's, the best version so far, is promoted with probability
    `alpha` at most: what many small losses may add up to."""
    alpha: Probability = 0.05
    """Probability of promoting wrongly, over all versions together that are compared with one anchor."""
    beta: Probability = 0.05
    """Probability of refusing a version that is as good as champion and anchor; half of it is for `tasks_max`."""
    tasks_max: Annotated[int, Field(ge=1, le=1_000_000)] = 6000
    """After so many tasks a candidate that is still undecided is refused. All versions play a task with one seed."""
    timeout_s: Positive = 3600.0
    """After so long a candidate that is still undecided is refused."""
    minimum_score: Annotated[float, Field(ge=0, le=1)] = 0.0
    """A version whose mean score is `margin` below this is promoted with probability `alpha` at most, whatever the
    champion has."""
    audit_tasks: Annotated[int, Field(ge=1, le=1_000_000)] = 200
    """How many plays of audit tasks, which choose nothing, measure the score that is reported of a version that
    serves."""
    concurrency: Annotated[int, Field(ge=2, le=4096)] = 16
    """How many plays the program is asked for at a time."""
    silence_s: Positive = 300.0
    """How long the program may be asked for something and print nothing before it is killed and its run counts as
    failed."""
    attempts: Annotated[int, Field(ge=1)] = 2
    """How often a run that failed (exit status, silence, wrong output) is tried before the candidate is rejected."""
    output_bytes_max: Annotated[int, Field(ge=1024)] = 67_108_864
    """Output of one run beyond this counts as a failed run."""
    ray: GateRaySettings = GateRaySettings()

    @property
    def passed_on(self) -> tuple[str, ...]:
        """Names of the environment variables that the program gets besides the system's own."""
        return (*self.environment, *self.ray.environment)

    @field_validator("command")
    @classmethod
    def _speaks_lines(cls, command: tuple[str, ...]) -> tuple[str, ...]:
        if any("{model}" in argument for argument in command):
            raise ValueError(
                "names {model}: a program is started once for all versions that are compared, and told on its standard "
                "input which version plays which task with which seed; leave {model} out, and see docs/gate.md"
            )
        return command


class RegistrySettings(ServiceSettings):
    """All of `[registry]`."""

    port: Port = INFO.port
    """Port of the REST interface; 0 lets the system choose."""
    gate: GateSettings = GateSettings()
    rollout: RolloutSettings = RolloutSettings()
    probe_timeout_s: Positive = 180.0
    """How long live replicas may take to load and probe a candidate before it is rejected."""
    lease_s: Annotated[float, Field(ge=1)] = 10.0
    """How long a leader that fell silent keeps its place; a standby registry takes over after that."""
    poll_s: Positive = 1.0
    """How often deadlines are looked at; events and requests are acted on at once."""
    reconcile_s: Positive = 5.0
    """How long the bus may show another routing than the database before it is published again."""
    served_max: Annotated[int, Field(ge=0, le=64)] = 4
    """How many versions may be served because somebody asked for them, over all models, besides champions and
    candidates; less than `inference.versions_max`, so that what is trained finds room."""
    retired_for_s: Annotated[float, Field(ge=0)] = 3600.0
    """How long a version has to be retired before its files may be collected."""
    versions_bytes_max: Annotated[int, Field(ge=1)] | None = None
    """Bytes that the files of all versions may take. Beyond it the registry retires and removes trained versions that
    nothing needs, those that never served first, the oldest first; manifests, labelled versions and two former
    champions of each model stay. None: 4 GiB, or ten times the largest version where that is more."""
    retry_s: Positive = 60.0
    """How long bus or database may be away before the process gives up and is restarted."""
