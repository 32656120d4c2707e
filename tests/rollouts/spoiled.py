"""Versions in six forms of damage: made of real ones, each with a manifest of its own."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from safetensors.torch import load, save
from torch import Tensor, nn, rand_like, zeros_like

from headrace_inference.torch_engine import loader
from headrace_inference.torch_engine.program import share
from headrace_schemas import ServedVersion
from headrace_schemas.values.blobs import File, Manifest
from tests.unit.inference.conftest import Models, Stored
from tests.unit.inference.importing.test_folder import damaged, damages

_WEIGHTS, _ADAPTER, _CONFIG = "model.safetensors", "adapter_model.safetensors", "adapter_config.json"
_TOKENIZER, _TEMPLATE = "tokenizer.json", "chat_template.jinja"
_FELT = ("embed_tokens.weight", "v_proj.weight", "o_proj.weight", "down_proj.weight")
"""Share of weights that changes every answer of so small a model; a single weight may move less than the tolerance."""


@dataclass(frozen=True)
class Spoiled:
    """Damaged version, to be served while `planted` is entered, together with `needs`."""

    served: ServedVersion
    about: str
    needs: tuple[ServedVersion, ...] = ()
    planted: Callable[[], AbstractContextManager[Any]] = field(default=contextlib.nullcontext)


class Workshop:
    """Makes them. `models.first` serves already: it is the parent of both others, and the adapter's base."""

    def __init__(self, models: Models, draw: random.Random) -> None:
        self._models = models
        self._draw = draw
        self._number = itertools.count(100)
        self._damages = itertools.chain.from_iterable(
            zip(damages(draw, models.second), damages(draw, models.adapter), strict=False)
        )
        self._sides = itertools.cycle((models.second, models.adapter))

    def flipped(self) -> Spoiled:
        """A bit in the store, of the manifest or of any file."""
        stored, (blob, position, bit) = next(self._sides), next(self._damages)
        where = f"{stored.version}: bit {bit} of byte {position} of {blob.sha256}"
        return Spoiled(stored.served, where, planted=lambda: damaged(self._models.blobs, blob, position, bit))

    def tokenizer(self) -> Spoiled:
        """Another tokenizer: by its digest alone, by its file, or by both."""
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
        """Under a right manifest: other weights, another strength, or another base."""
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
        """In some of its layers, by an engine that forgets it, or already where its fingerprint was taken."""
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
        """Some of the weights are the parent's, or all, by a trainer that took the fingerprint of these."""
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
        """At least one that matters, and whichever else."""
        first = self._draw.choice([name for name in names if any(part in name for part in felt)])
        return {first, *self._draw.sample(names, self._draw.randint(0, len(names) - 1))}

    def _bytes(self, stored: Stored, path: str) -> bytes:
        return self._models.blobs.get(next(file.blob for file in stored.manifest.files if file.path == path))

    def _tensors(self, stored: Stored, path: str) -> dict[str, Tensor]:
        return dict(load(self._bytes(stored, path)))

    def _version(self, stored: Stored, files: Mapping[str, bytes] | None = None, /, **fields: object) -> ServedVersion:
        """The version with other files under the same manifest, but for its number."""
        blobs = {path: self._models.blobs.put(content) for path, content in (files or {}).items()}
        named = tuple(File(path=file.path, blob=blobs.get(file.path, file.blob)) for file in stored.manifest.files)
        fields_of_version = {"step": next(self._number), "files": named, **fields}
        manifest = Manifest.model_validate({**dict(stored.manifest), **fields_of_version})
        return ServedVersion(version=manifest.version, manifest=self._models.blobs.put(manifest.canonical_json()))


def _without(_self: loader.Loader, base: nn.Module, _folder: Path) -> nn.Module:
    return share(base)


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
"""How each is made, and which part of all it is. The last three take real weights to be found."""


def sound(models: Models) -> Iterator[ServedVersion]:
    """Versions that the same replica has to serve."""
    yield models.second.served
    yield models.adapter.served
