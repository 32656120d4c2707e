"""1,000 versions whose content differs from their manifest, for a replica with weights, and faults of the replica's
checks.

The versions have six kinds of damage. Each is made from a real version and has its own manifest.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

from safetensors.torch import load, save
from torch import Tensor, nn, rand_like, zeros_like

from headrace_inference import fleet as fleets
from headrace_inference.errors import UnknownVersion
from headrace_inference.fleet import Fleet, FleetLimits
from headrace_inference.settings import TorchSettings
from headrace_inference.torch_engine import loader
from headrace_inference.torch_engine.engine import TorchEngine
from headrace_inference.torch_engine.program import share_tensors
from headrace_runtime.storage.versions import VersionCache
from headrace_schemas import Routing, ServedVersion
from headrace_schemas.values.base import utcnow
from headrace_schemas.values.blobs import File, Manifest
from tests.system.program import Line, caught, no_problems
from tests.unit.inference.conftest import Models, Stored, make_models
from tests.unit.inference.importing.test_folder import damaged, damages

_WEIGHTS, _ADAPTER, _CONFIG = "model.safetensors", "adapter_model.safetensors", "adapter_config.json"
_TOKENIZER, _TEMPLATE = "tokenizer.json", "chat_template.jinja"
_FELT = ("embed_tokens.weight", "v_proj.weight", "o_proj.weight", "down_proj.weight")
"""Parts of the names of weights whose change alters every answer of the small model. Other weights may have too little
effect for the tolerance.
"""


@dataclass(frozen=True)
class Spoiled:
    """A damaged version. It is served together with `needs`, within the context `planted`."""

    served: ServedVersion
    about: str
    needs: tuple[ServedVersion, ...] = ()
    planted: Callable[[], AbstractContextManager[Any]] = field(default=contextlib.nullcontext)


class Workshop:
    """Factory of damaged versions. `models.first` is already served; it is the parent of `second` and the adapter's
    base.
    """

    def __init__(self, models: Models, draw: random.Random) -> None:
        self._models = models
        self._draw = draw
        self._number = itertools.count(100)
        self._damages = itertools.chain.from_iterable(
            zip(damages(draw, models.second), damages(draw, models.adapter), strict=False)
        )
        self._sides = itertools.cycle((models.second, models.adapter))

    def flipped(self) -> Spoiled:
        """Return a version with a flipped bit in the blob store, in its manifest or one of its files."""
        stored, (blob, position, bit) = next(self._sides), next(self._damages)
        where = f"{stored.version}: bit {bit} of byte {position} of {blob.sha256}"
        return Spoiled(stored.served, where, planted=lambda: damaged(self._models.blobs, blob, position, bit))

    def tokenizer(self) -> Spoiled:
        """Return a version with another tokenizer: only in its digest, only in its file, or in both."""
        return self._tokens("tokenizer_sha256", _TOKENIZER)

    def template(self) -> Spoiled:
        return self._tokens("template_sha256", _TEMPLATE)

    def _tokens(self, digest: str, path: str) -> Spoiled:
        content = self._bytes(self._models.second, path) + b" " * self._draw.randint(1, 9)
        blob = self._models.blobs.put(content)
        how = self._draw.choice(("digest", "file", "both"))
        fields = {} if how == "file" else {digest: blob.sha256}
        files = {} if how == "digest" else {path: content}
        return Spoiled(self._version(self._models.second, files, **fields), f"another {path}, by its {how}")

    def wrong_adapter(self) -> Spoiled:
        """Return an adapter with a correct manifest, but with other weights, another scale, or another base."""
        adapter, second = self._models.adapter, self._models.second
        how = self._draw.choice(("weights", "strength", "base"))
        if how == "base":
            return Spoiled(self._version(adapter, base=second.version), "the base is another one", (second.served,))
        if how == "strength":
            config = json.loads(self._bytes(adapter, _CONFIG))
            config["lora_alpha"] = self._draw.choice((1, 2, 16, 32, 64))  # it is 8
            return Spoiled(self._version(adapter, {_CONFIG: json.dumps(config).encode()}), "another strength")
        drawn = {name: (rand_like(tensor) - 0.5) * 0.7 for name, tensor in self._tensors(adapter, _ADAPTER).items()}
        return Spoiled(self._version(adapter, {_ADAPTER: _saved(drawn)}), "the weights are another adapter's")

    def not_applied(self) -> Spoiled:
        """Return an adapter that has no effect in some layers, in the engine, or when its fingerprint was taken."""
        adapter = self._models.adapter
        how = self._draw.choice(("layers", "engine", "fingerprint"))
        if how == "engine":
            forgets = mock.patch.object(loader.Loader, "_adapter", _without)
            return Spoiled(self._version(adapter), "the engine leaves it out", planted=lambda: forgets)
        tensors = self._tensors(adapter, _ADAPTER)
        ups = sorted(name for name in tensors if "lora_B" in name)
        out = set(ups) if how == "fingerprint" else self._some(ups, "v_proj")
        tensors |= {name: zeros_like(tensors[name]) for name in out}
        fields = {"fingerprint": self._models.first.manifest.fingerprint} if how == "fingerprint" else {}
        about = f"{len(out)} of {len(ups)} modules do nothing"
        return Spoiled(self._version(adapter, {_ADAPTER: _saved(tensors)}, **fields), about)

    def stale_parent(self) -> Spoiled:
        """Return a version with some or all weights of its parent. If all, the fingerprint is the parent's, too."""
        first, second = self._models.first, self._models.second
        old, new = self._tensors(first, _WEIGHTS), self._tensors(second, _WEIGHTS)
        if self._draw.random() < 0.3:
            files = {_WEIGHTS: self._bytes(first, _WEIGHTS)}
            fingerprint = {"fingerprint": first.manifest.fingerprint}
            return Spoiled(self._version(second, files, **fingerprint), "the parent's weights with its fingerprint")
        stale = self._some(sorted(new), *_FELT)
        mixed = {name: old[name] if name in stale else tensor for name, tensor in new.items()}
        return Spoiled(self._version(second, {_WEIGHTS: _saved(mixed)}), f"{len(stale)} of {len(new)} tensors are old")

    def _some(self, names: list[str], *felt: str) -> set[str]:
        """Return a random subset of `names` with at least one name that contains one of `felt`."""
        first = self._draw.choice([name for name in names if any(part in name for part in felt)])
        return {first, *self._draw.sample(names, self._draw.randint(0, len(names) - 1))}

    def _bytes(self, stored: Stored, path: str) -> bytes:
        return self._models.blobs.get(next(file.blob for file in stored.manifest.files if file.path == path))

    def _tensors(self, stored: Stored, path: str) -> dict[str, Tensor]:
        return dict(load(self._bytes(stored, path)))

    def _version(self, stored: Stored, files: Mapping[str, bytes] | None = None, /, **fields: object) -> ServedVersion:
        """Return a version with the same manifest except for `files`, `fields` and a new step number."""
        blobs = {path: self._models.blobs.put(content) for path, content in (files or {}).items()}
        named = tuple(File(path=file.path, blob=blobs.get(file.path, file.blob)) for file in stored.manifest.files)
        fields_of_version = {"step": next(self._number), "files": named, **fields}
        manifest = Manifest.model_validate({**dict(stored.manifest), **fields_of_version})
        return ServedVersion(version=manifest.version, manifest=self._models.blobs.put(manifest.canonical_json()))


def _without(_self: loader.Loader, base: nn.Module, _folder: Path) -> nn.Module:
    return share_tensors(base)


def _saved(tensors: Mapping[str, Tensor]) -> bytes:
    return bytes(save(dict(tensors), metadata={"format": "pt"}))


FORMS: Mapping[str, tuple[Callable[[Workshop], Spoiled], float]] = {
    "flipped bytes": (Workshop.flipped, 0.3),
    "tokenizer": (Workshop.tokenizer, 0.15),
    "template": (Workshop.template, 0.15),
    "wrong adapter": (Workshop.wrong_adapter, 0.15),
    "stale parent": (Workshop.stale_parent, 0.125),
    "adapter not applied": (Workshop.not_applied, 0.125),
}
"""Factory method of each kind of damage, and its share of all versions. Detecting the last three needs real weights."""


def sound(models: Models) -> Iterator[ServedVersion]:
    """Yield undamaged versions, which the same replica has to serve."""
    yield models.second.served
    yield models.adapter.served


_WAIT_S = 120.0
_PLANTED = 6
Planted = Callable[[], AbstractContextManager[Any]]
LEFT_OUT: dict[str, tuple[Planted, tuple[str, ...]]] = {
    "nobody judges a probe": (
        lambda: mock.patch.object(fleets, "_check_probe", return_value=None),
        ("wrong adapter", "stale parent", "adapter not applied"),
    ),
    "nobody compares tokens": (
        lambda: mock.patch.object(Fleet, "_check", return_value=None),
        ("tokenizer", "template"),
    ),
}
"""Faults of the replica's own checks, and the kinds of damage that the replica then serves."""


class Inspected:
    """A replica's fleet, with the parent version loaded."""

    def __init__(self, models: Models, cache: Path) -> None:
        self._models = models
        self._cache = cache
        self._news = asyncio.Event()
        self._engine = TorchEngine(TorchSettings(device="cpu", threads=1))
        limits = FleetLimits(versions_max=8, drain_s=0.0, retry_s=0.01)
        self._fleet = Fleet(self._engine, VersionCache(models.blobs, cache), limits, self._news.set)
        self._revision = 0

    async def stop(self) -> None:
        await self._fleet.close()
        await self._engine.stop()

    async def serves(self, served: ServedVersion, *dependencies: ServedVersion) -> str | None:
        """Load a version. Return None if it becomes ready, otherwise the reason. The version is removed afterwards."""
        try:
            self._route(self._models.first.served, *dependencies, served)
            await self._until(lambda: self._state(served) in ("ready", "failed"))
            if self._state(served) == "ready":
                self._fleet.find_version(served.version)
                return None
            with contextlib.suppress(UnknownVersion):
                self._fleet.find_version(served.version)
                return None
            loaded_before = served.version in self._engine._models
            assert not loaded_before, f"{served.version} was refused, and the engine holds it"
            return next(version.error or "" for version in self._fleet.versions() if version.version == served.version)
        finally:
            await self._alone()
            for version in (served, *dependencies):  # what was once whole here needs no store
                await asyncio.to_thread(shutil.rmtree, self._cache / version.version, ignore_errors=True)

    async def _alone(self) -> None:
        only = [self._models.first.version]
        self._route(self._models.first.served)
        await self._until(lambda: [*self._states()] == only and [*self._engine._models] == only)

    def _route(self, *serve: ServedVersion) -> None:
        self._revision += 1
        about = {"time": utcnow(), "model": "tiny", "revision": self._revision, "aliases": {}, "serve": serve}
        self._fleet.follow([Routing.model_validate(about)])

    def _states(self) -> dict[str, str]:
        return {version.version: version.state for version in self._fleet.versions()}

    def _state(self, served: ServedVersion) -> str | None:
        return self._states().get(served.version)

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(_WAIT_S):
            while not condition():
                self._news.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), 0.05)


@contextlib.asynccontextmanager
async def inspected(models: Models, cache: Path) -> AsyncIterator[Inspected]:
    replica = Inspected(models, cache)
    try:
        yield replica
    finally:
        await replica.stop()


async def served_faults(replica: Inspected, spoiled_versions: list[Spoiled]) -> list[str]:
    """Return a text for each damaged version that the replica would have served."""
    sentences = []
    for spoiled in spoiled_versions:
        with spoiled.planted():
            if await replica.serves(spoiled.served, *spoiled.needs) is None:
                sentences.append(f"{spoiled.served.version} is served: {spoiled.about}")
    return sentences


async def lines(folder: Path, count: int, draw: random.Random) -> list[Line]:
    """Return the lines of undamaged versions, of each kind of damage, and of each check that is left out."""
    models = await asyncio.to_thread(make_models, folder)
    shop = Workshop(models, draw)
    async with inspected(models, folder / "cache") as replica:
        refusals = [refusal for version in sound(models) if (refusal := await replica.serves(version)) is not None]
        measured = [no_problems("sound versions are served", refusals)]
        for form, (make, share) in FORMS.items():
            number = round(count * share)
            served = await served_faults(replica, [make(shop) for _ in range(number)])
            line = no_problems(f"versions that are served with: {form}", served)
            measured.append(replace(line, details={**line.details, "injected": number}))
        for name, (planted, forms) in LEFT_OUT.items():
            with planted():
                spoiled = [FORMS[form][0](shop) for form in forms for _ in range(_PLANTED)]
                served = await served_faults(replica, spoiled)
            measured.append(caught(name, by_the_suite=bool(served)))
    return measured
