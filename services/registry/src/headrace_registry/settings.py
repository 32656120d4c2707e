"""Settings of the registry: the section `[registry]`."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, field_validator

from headrace_registry import INFO
from headrace_registry.rollouts.settings import RolloutSettings
from headrace_runtime.process.programs import VariableName
from headrace_runtime.settings.sections import Port, Section, ServiceSettings
from headrace_runtime.settings.table import Fixed

Positive = Annotated[float, Field(gt=0)]
Probability = Annotated[float, Field(gt=0, le=0.5)]
Margin = Annotated[float, Field(gt=0, le=1)]
CPUS_OF_COPY = 1.0
"""CPUs of a Ray cluster that each copy of the gate's program takes: it waits for the gateway most of the time. A run
fails if the cluster has no room for all copies."""


class GateRaySettings(Section):
    """Copies of the gate's program on the machines of a Ray cluster, which share the plays."""

    FIXED: ClassVar = {"cpus": Fixed(CPUS_OF_COPY), "environment": Fixed((), "set registry.gate.environment")}

    workers: Annotated[int, Field(ge=0, le=1024)] = 0
    """Copies of the program; 0 runs one copy on the registry's machine. Needs headrace-registry[ray] here and on the
    cluster's machines, with the same Python, and the program's files under the same path."""
    address: Annotated[str, Field(min_length=1)] = "auto"
    """The cluster: `host:port` of its head, or `auto` for the cluster that this machine is part of. Its machines must
    be able to reach the gateway at `gate.base_url`."""


class GateSettings(Section):
    """The held-out evaluation that a candidate must pass: a sequential paired test, see `docs/gate.md`."""

    COMMON: ClassVar = ("command", "margin", "tasks_max", "audit_tasks")
    PARAMETERS: ClassVar = ("attempts",)

    command: tuple[str, ...] = ()
    """Program and arguments that play held-out tasks; empty: a candidate is promoted after its probe. `{base_url}` is
    replaced by the gateway's URL, `{python}` by the interpreter that runs the registry. The program prints the names of
    its tasks in a line `{"gate": [...], "audit": [...]}`, then reads lines `{"version": ..., "task": ..., "seed": ...}`
    and answers each with a line that adds `"score": 0..1`, until its standard input ends."""
    base_url: str = "http://127.0.0.1:8000/v1"
    """URL that replaces `{base_url}`; `headrace up` fills in the gateway that it started."""
    environment: tuple[VariableName, ...] = ()
    """Environment variables of the registry that the program gets in addition to the system's own (`PATH`, `HOME`,
    `LANG`, `TZ`, those of Python and of the processors), for example `OPENAI_API_KEY` if the gateway requires a key.
    Copies on a Ray cluster get them, too."""
    margin: Margin = 0.1
    """Tolerated loss against the champion: a version whose mean score is lower by `margin` is promoted with probability
    `alpha` at most."""
    anchor_margin: Margin = 0.05
    """Tolerated loss against the anchor, the last version shown to be better than its anchor: a version whose mean
    score is lower by this much is promoted with probability `alpha` at most. It bounds the sum of many small losses."""
    alpha: Probability = 0.05
    """Probability of a wrong promotion, over all versions together that are compared with one anchor."""
    beta: Probability = 0.05
    """Probability of refusing a version that is as good as champion and anchor; half of it is for `tasks_max`."""
    tasks_max: Annotated[int, Field(ge=1, le=1_000_000)] = 6000
    """Number of tasks after which a candidate that is still undecided is refused. All versions play a task with one
    seed."""
    timeout_s: Positive = 3600.0
    """Seconds after which a candidate that is still undecided is refused."""
    minimum_score: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Mean score that a version must reach besides its opponents: a version that is lower by `margin` is promoted with
    probability `alpha` at most."""
    audit_tasks: Annotated[int, Field(ge=1, le=1_000_000)] = 200
    """Number of plays of audit tasks that measure the reported score of a version that serves. They take part in no
    decision."""
    concurrency: Annotated[int, Field(ge=2, le=4096)] = 16
    """Number of plays that are requested from the program at a time."""
    silence_s: Positive = 300.0
    """Seconds without a line of output, while a request is open, after which the program is killed and its run counts
    as failed."""
    attempts: Annotated[int, Field(ge=1)] = 2
    """Number of runs that may fail (exit status, silence, wrong output) before the candidate is rejected: a second one
    tells a program that is broken from one that was killed."""
    ray: GateRaySettings = GateRaySettings()

    @field_validator("command")
    @classmethod
    def _check_placeholders(cls, command: tuple[str, ...]) -> tuple[str, ...]:
        if any("{model}" in argument for argument in command):
            raise ValueError(
                "names {model}: a program is started once for all versions that are compared, and reads version, "
                "task and seed of each play from its standard input; remove {model}, and see docs/gate.md"
            )
        return command


class RegistrySettings(ServiceSettings):
    """Settings of the registry."""

    SHARED: ClassVar = ("host", "lease_s", "retry_s")
    FIXED: ClassVar = {"reconcile_s": Fixed(5.0)}

    port: Port = INFO.port
    """Port of the REST interface; 0 lets the system choose."""
    gate: GateSettings = GateSettings()
    rollout: RolloutSettings = RolloutSettings()
    probe_timeout_s: Positive = 180.0
    """Seconds that live replicas have to load and probe a candidate before it is rejected."""
    lease_s: Annotated[float, Field(ge=1)] = 10.0
    """Seconds for which a leader that does not renew its lease stays the leader; a standby registry takes over after
    that."""
    poll_s: Positive = 1.0
    """Seconds between checks of deadlines; events and requests are handled at once."""
    served_max: Annotated[int, Field(ge=0, le=40)] = 4
    """Number of versions, over all models, that operators may serve besides champions and candidates. It must be less
    than `inference.versions_max`, so that trained versions find room. A routing holds 64 versions: up to 24 of them are
    champions and candidates, each with its base."""
    retired_for_s: Annotated[float, Field(ge=0)] = 3600.0
    """Seconds that a version must have been retired before its files may be collected."""
    versions_bytes_max: Annotated[int, Field(ge=1)] | None = None
    """Bytes that the files of all versions and the next one may take. Beyond it the registry retires and removes
    trained versions that are not needed: first versions that never served, the oldest first. Manifests, labelled
    versions and two former champions of each model stay. Without a value: 2 GiB, or five times the largest version
    if that is more."""
    retry_s: Positive = 60.0
    """Seconds that bus or database may be away before the process gives up and is restarted."""
