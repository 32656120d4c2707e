"""`attach`: the way into a Headrace, whether it runs already or not."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from headrace.errors import UsageError
from headrace.sessions import root_of
from headrace.stack.connection import ENTERED, Addresses, Stack, model_name, support

PRIVATE = {
    "trainer.steps_per_version": 1,
    "trainer.batch_experiences_min": 1,
    "trainer.batch_wait_s": 3.0,
    "trainer.group_wait_s": 20.0,
    "trainer.save_interval_s": 3.0,
    "trainer.max_staleness": 8,
}
"""What a private Headrace is set to where nothing else is said: it serves one program, which waits for each step."""


_WEB = ("http://", "https://")
_FIRST_S = 300.0
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
    """A running Headrace, or a private one.

    `url` is the gateway of one that runs, or the data directory of a `headrace up` on this machine; `addresses` says
    where its other parts are when they are not in their usual places. `base`, `model` and `settings` are then compared
    with what the trainer tells of itself, and a difference is refused by name.

    Without `url` a private Headrace starts from the model folder `base`, on free ports, and keeps its data in
    `data_dir`, or in a folder that is removed at its end. `settings` are dotted names: `{"trainer.lora.rank": 8}`.

    Raises `UsageError`, `Unreachable`, and `StartFailed` when a service refuses its settings.
    """
    given = dict(settings or {})
    if url is None and addresses is None:
        for argument, value in (("api_key", api_key), ("internal_key", internal_key)):
            if value is not None:
                raise UsageError(
                    f"{argument}: a private Headrace makes its own; name the url of one that runs, or leave it out"
                )
        return _private(base, model, given, data_dir)
    if data_dir is not None:
        raise UsageError("data_dir is for a private Headrace; one that runs has its own, so leave data_dir or url out")
    found = addresses or _addresses(url)
    if (
        addresses is not None
        and url is not None
        and str(url).startswith(_WEB)
        and root_of(str(url)) != addresses.gateway
    ):
        raise UsageError(f"url = {str(url)!r}: addresses names the gateway {addresses.gateway}; leave one of them out")
    folder = Path(url) if url is not None and not str(url).startswith(_WEB) else None
    stack = Stack(found, model or "", data_dir=folder, api_key=api_key, internal_key=internal_key)
    stack.check(base, model, given)
    stack.model = model or str(stack.settings()["trainer.model"])
    return stack


def current() -> Stack:
    """The innermost stack that was entered. Raises `UsageError` when there is none."""
    found = ENTERED.get()
    if found is None:
        raise UsageError("no Headrace is attached: do this inside of `with headrace.stack.attach(...):`")
    return found


@contextmanager
def stack_for(
    base: str | Path | None,
    settings: Mapping[str, object],
    data_dir: str | Path | None = None,
    private: Mapping[str, object] | None = None,
) -> Iterator[Stack]:
    """The stack that was entered, which has to be set to this; else a private one for the body, with the settings
    `private` as well: defaults that say nothing about the stack that was entered."""
    entered = ENTERED.get()
    if entered is not None:
        entered.check(base, None, settings)
        if data_dir is not None and Path(data_dir).absolute() != (entered.data_dir or Path()).absolute():
            raise UsageError(
                f"checkpoint_dir = {str(data_dir)!r}: the Headrace that was entered keeps its data in "
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
            f"base = {str(base or '')!r}: a private Headrace starts from a model folder with config.json, weights and "
            "tokenizer; download the model to a folder and name that, or name the url of a Headrace that runs"
        )
    name = model or model_name(folder)
    wanted = {
        **PRIVATE,
        "trainer.base": str(folder.absolute()),
        "trainer.model": name,
        "gateway.model_aliases": {str(base): name} if str(base) != name else {},
        **settings,
    }
    started = support("headrace_cli.private_stack", "headrace-cli").start(wanted, data_dir and Path(data_dir))
    stack = Stack(Addresses(**started.addresses), name, services=started)
    deadline = time.monotonic() + _FIRST_S
    while stack.serving() is None:
        if time.monotonic() > deadline:
            stack.stop()
            raise UsageError(f"{name} has no champion after {_FIRST_S:g} s; the registry's log says why")
        time.sleep(_POLL_S)
    return stack


def _addresses(url: str | Path | None) -> Addresses:
    text = str(url)
    if text.startswith(_WEB):
        return Addresses(gateway=root_of(text))
    return Addresses(**support("headrace_cli.private_stack", "headrace-cli").addresses(Path(text)))
