"""`attach`, which connects to a running Headrace or starts a private one, and offline training jobs on a stack."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.blocking import blocking
from headrace.errors import UsageError
from headrace.sessions import gateway_root, new_id
from headrace_integrations.stack.connection import ENTERED, Addresses, Stack
from headrace_operations.arguments import model_name
from headrace_schemas.values.text import plain_json

PRIVATE = {
    "trainer.steps_per_version": 1,
    "trainer.batch_experiences_min": 1,
    "trainer.batch_wait_s": 3.0,
    "trainer.group_wait_s": 20.0,
    "trainer.save_interval_s": 3.0,
    "trainer.max_staleness": 8,
}
"""Default settings of a private Headrace. It serves a single program, which waits for each step."""

_WEB = ("http://", "https://")
_FIRST_CHAMPION_S = 300.0
_POLL_S = 0.2


def attach(
    url: str | Path | None = None,
    *,
    base: str | Path | None = None,
    model: str | None = None,
    settings: Mapping[str, object] | None = None,
    addresses: Addresses | None = None,
    data_dir: str | Path | None = None,
    api_key: str | None = None,
    internal_key: str | None = None,
) -> Stack:
    """Connect to a running Headrace, or start a private one.

    A running Headrace is given by `url` or `addresses`. `base`, `model` and `settings` are then compared with those of
    its trainer, and `UsageError` names a difference. Without `url`, a private Headrace starts on free ports.

    Args:
        url: address of the gateway, or the data directory of a `headrace up` on this machine.
        base: folder of the base model. A private Headrace starts from it.
        model: name of the trained model.
        settings: settings by dotted name, for example `{"trainer.lora.rank": 8}`.
        addresses: addresses of the services, if they differ from those of `headrace up`.
        data_dir: data directory of a private Headrace; by default a folder that is removed at its end.

    Raises:
        UsageError: arguments contradict each other or the running Headrace.
        Unreachable: a service does not answer.
        StartFailed: a service refuses its settings.
    """
    requested = dict(settings or {})
    if url is None and addresses is None:
        for argument, value in (("api_key", api_key), ("internal_key", internal_key)):
            if value is not None:
                raise UsageError(
                    f"{argument}: a private Headrace creates its own key; pass the url of a running Headrace, or leave "
                    f"{argument} out"
                )
        return _private(base, model, requested, data_dir)
    if data_dir is not None:
        raise UsageError(
            "data_dir: only a private Headrace takes it, and a running one has its own; leave data_dir or url out"
        )
    resolved = addresses or _addresses(url)
    if (
        addresses is not None
        and url is not None
        and str(url).startswith(_WEB)
        and gateway_root(str(url)) != addresses.gateway
    ):
        raise UsageError(f"url = {str(url)!r}: addresses names the gateway {addresses.gateway}; leave one of them out")
    folder = Path(url) if url is not None and not str(url).startswith(_WEB) else None
    stack = Stack(resolved, model or "", data_dir=folder, api_key=api_key, internal_key=internal_key)
    stack.check(base, model, requested)
    stack.model = model or str(stack.settings()["trainer.model"])
    return stack


def current() -> Stack:
    """Return the stack of the innermost `with attach(...)` block. Raises `UsageError` outside of such a block."""
    stack = ENTERED.get()
    if stack is None:
        raise UsageError("no Headrace is attached; call this within `with headrace.stack.attach(...):`")
    return stack


@contextmanager
def stack_for(
    base: str | Path | None,
    settings: Mapping[str, object],
    data_dir: str | Path | None = None,
    private: Mapping[str, object] | None = None,
) -> Iterator[Stack]:
    """Yield the stack of the enclosing `with attach(...)`, or else a private stack that lasts for this `with` block.

    The settings of an enclosing stack must agree with `base`, `settings` and `data_dir`.

    Args:
        private: further settings for a private stack. They are not compared with those of an enclosing stack.
    """
    entered = ENTERED.get()
    if entered is not None:
        entered.check(base, None, settings)
        if data_dir is not None and Path(data_dir).absolute() != (entered.data_dir or Path()).absolute():
            raise UsageError(
                f"checkpoint_dir = {str(data_dir)!r}: the entered Headrace keeps its data in "
                f"{entered.data_dir}; leave it out"
            )
        yield entered
        return
    with attach(base=base, settings={**settings, **(private or {})}, data_dir=data_dir) as stack:
        yield stack


def _private(
    base: str | Path | None, model: str | None, settings: Mapping[str, object], data_dir: str | Path | None
) -> Stack:
    folder = Path(str(base or settings.get("trainer.base") or ""))
    if not (folder / "config.json").is_file():
        raise UsageError(
            f"base = {str(base or '')!r}: must be a model folder with config.json, weights and tokenizer; download "
            "the model and pass its folder, or pass the url of a running Headrace"
        )
    name = model or model_name(folder)
    settings_to_start = {
        **PRIVATE,
        "trainer.base": str(folder.absolute()),
        "trainer.model": name,
        "gateway.model_aliases": {str(base): name} if str(base) != name else {},
        **settings,
    }
    from headrace_operations import private_stack

    services = private_stack.start(settings_to_start, Path(data_dir) if data_dir else None)
    stack = Stack(Addresses(**services.addresses), name, services=services)
    deadline = time.monotonic() + _FIRST_CHAMPION_S
    while stack.serving() is None:
        if time.monotonic() > deadline:
            stack.stop()
            raise UsageError(f"{name} has no champion after {_FIRST_CHAMPION_S:g} s; see the registry's log")
        time.sleep(_POLL_S)
    return stack


def _addresses(url: str | Path | None) -> Addresses:
    text = str(url)
    if text.startswith(_WEB):
        return Addresses(gateway=gateway_root(text))
    from headrace_operations import private_stack

    return Addresses(**private_stack.addresses(Path(text)))


def train_rows(
    stack: Stack,
    kind: str,
    rows: Iterable[Mapping[str, Any]],
    *,
    epochs: int = 1,
    settings: Mapping[str, object] | None = None,
    timeout_s: float = 600.0,
) -> str:
    """Train on rows, offer the resulting version to the registry, and return it once the registry has decided about it.

    Args:
        kind: algorithm of the job, for example `sft` or `dpo`.
        rows: rows with the columns of a data set (docs/guides/offline-training.md).

    Raises:
        UsageError: rows or settings are invalid.
        HeadraceError: the job failed.
    """
    if stack.data_dir is None:
        raise UsageError(
            "data_dir: an offline job needs it; attach to the data directory of `headrace up`, or use `headrace train`"
        )
    from headrace_operations import jobs

    trainer_settings = stack.settings()
    job_settings = {"trainer.model": stack.model, **(settings or {})}
    with tempfile.TemporaryDirectory(prefix="headrace-rows-") as folder:
        path = Path(folder) / "rows.jsonl"
        path.write_text(
            "".join(f"{json.dumps(plain_json(row), ensure_ascii=False)}\n" for row in rows), encoding="utf-8"
        )
        job = jobs.Job(
            kind=kind,
            source=path,
            base=trainer_settings["trainer.base"],
            lineage=f"{kind}-{new_id()[-12:]}",
            settings=job_settings,
            epochs=epochs,
            bus=stack.bus,
            data_dir=stack.data_dir,
            offer=True,
        )
        with ThreadPoolExecutor(1, thread_name_prefix="headrace-job") as thread:  # the caller may have an event loop
            version = thread.submit(jobs.run, job).result()
    blocking(stack.until_decided(version, timeout_s))
    return version
