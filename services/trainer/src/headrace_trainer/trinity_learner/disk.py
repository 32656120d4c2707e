"""The folder that Trinity and the trainer share: models, checkpoints with optimizer, jobs, the pending batch, and
weights files: as bytes, their fingerprint, and whether they are finite.

    base/               the model that the lineage began with
    models/<digest>/    a whole model: weights, and the base's other files
    kept/<digest>/      Trinity's checkpoint of the step that made these weights
    jobs/               Trinity's own: configurations, logs, databases, one folder per job
    pending.json        the batch that was handed over last

Everything but `jobs/` appears atomically: it is written under another name and then renamed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from headrace_runtime.errors import SettingError
from headrace_runtime.process.logs import get_logger
from headrace_runtime.storage import versions
from headrace_runtime.storage.versions import fingerprint_tokens
from headrace_schemas.values.base import Model, Sha256
from headrace_schemas.values.blobs import Fingerprint
from headrace_trainer.trinity_learner.configuration import TrinityJob

log = get_logger(__name__)
_DRAFT = ".draft-"
_WEIGHTS_CHUNK = 1 << 24
_WORD = b"headrace trinity weights of lineage "


class Pending(Model):
    """Record of a batch that was handed over to Trinity-RFT and whose step is not confirmed yet.

    It is durable before Trinity can read the batch, so that a crash neither loses nor repeats the step.
    """

    start: Sha256
    """The weights that the batch was cut for."""
    batch: Sha256
    job: str
    step: int
    """The number of Trinity's step for this batch."""


class Disk:
    """Folder that Trinity and the trainer share. Only one trainer process at a time may write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.base = self.folder / "base"
        self.jobs = self.folder / "jobs"
        self.jobs.mkdir(parents=True, exist_ok=True)

    def model(self, digest: str) -> Path:
        return self.folder / "models" / digest

    def checkpoint(self, digest: str) -> Path:
        return self.folder / "kept" / digest

    def put_base(self, folder: Path) -> None:
        """Replace the copy of the base model in the shared folder by the model files of `folder`."""
        with self.appearing(self.base) as draft:
            for path in versions.model_files(folder):
                _copy(path, draft / path.relative_to(folder))

    def put_model(self, weights: Sequence[Path]) -> str:
        """Store a whole model with these weights, and return its digest."""
        digest = digest_of(weights)
        if not self.model(digest).exists():
            with self.appearing(self.model(digest)) as draft:
                for path in versions.model_files(self.base):
                    if not versions.is_weights(path.name):
                        _link(path, draft / path.relative_to(self.base))
                for path in weights:
                    _link(path, draft / path.name)
        _touch(self.model(digest))
        return digest

    def keep(self, digest: str, checkpoint: Path) -> None:
        """Store a copy of Trinity's checkpoint folder of the weights with this digest, which Trinity may later
        remove."""
        if not self.checkpoint(digest).exists():
            with self.appearing(self.checkpoint(digest)) as draft:
                copied = shutil.copytree(checkpoint, draft / checkpoint.name, copy_function=_link)
                (draft / "step").write_text(str(copied).rpartition("_")[2], encoding="ascii")
        _touch(self.checkpoint(digest))

    def begin(self, job: TrinityJob, digest: str | None) -> int:
        """Create a job's folder with the stored checkpoint `digest` of its initial weights, None without a checkpoint.

        Return the step number of that checkpoint, or 0.
        """
        job.folder.mkdir(parents=True)
        if digest is None:
            return 0
        stored = self.checkpoint(digest)
        step = int((stored / "step").read_text(encoding="ascii"))
        shutil.copytree(stored / f"global_step_{step}", job.folder / f"global_step_{step}", copy_function=_link)
        (job.folder / "trainer_meta.json").write_text(
            json.dumps({"latest_iteration": step, "sample_strategy_state": {}}), encoding="utf-8"
        )
        for name in ("latest_state_dict_iteration.txt", "latest_checkpointed_iteration.txt"):
            (job.folder / name).write_text(str(step), encoding="ascii")
        return step

    def pending(self) -> Pending | None:
        """Return the batch that was handed over last. None without one, or if its file is damaged: then Trinity trains
        the batch again, from the weights before it.
        """
        path = self.folder / "pending.json"
        try:
            return Pending.model_validate_json(path.read_bytes()) if path.exists() else None
        except ValueError as error:
            log.warning("pending_batch_unreadable", path=str(path), error=str(error))
            return None

    def set_pending(self, pending: Pending) -> None:
        """Store the record of the batch that Trinity will train. It is durable when the method returns."""
        path = self.folder / "pending.json"
        draft = path.with_name(_DRAFT + path.name)
        with draft.open("wb") as file:
            file.write(pending.model_dump_json().encode())
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        _sync(self.folder)

    def sweep(self, jobs: Sequence[str], used: Sequence[str], most: int) -> None:
        """Remove all jobs except `jobs`, and all models and checkpoints except those in `used` and the newest
        `most`."""
        for path in (*self.jobs.glob("*/j*"), *self.jobs.glob("j*")):
            if path.name.partition(".")[0] not in jobs:
                _remove(path)
        for kind in ("models", "kept"):
            folders = [path for path in (self.folder / kind).glob("*") if not path.name.startswith(_DRAFT)]
            folders.sort(key=lambda path: -path.stat().st_mtime_ns)
            for path in folders[most:]:
                if path.name not in used:
                    _remove(path)
            for path in (self.folder / kind).glob(f"{_DRAFT}*"):
                _remove(path)

    @contextmanager
    def appearing(self, path: Path) -> Iterator[Path]:
        """Open a context with a new folder, which is renamed to `path` at the end, so that `path` is always
        complete."""
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f"{_DRAFT}{uuid.uuid4().hex}")
        draft.mkdir()
        try:
            yield draft
            _remove(path)
            draft.rename(path)
            _sync(path.parent)
        except BaseException:
            _remove(draft)
            raise


def weights_in(folder: Path) -> list[Path]:
    """Return the weights files of a model's folder."""
    return [path for path in versions.model_files(folder) if versions.is_weights(path.name)]


def step_of(job: TrinityJob) -> int:
    """Return the last step that Trinity has reported as completely saved; 0 before the first."""
    try:
        return int((job.folder / "latest_checkpointed_iteration.txt").read_text(encoding="ascii"))
    except (OSError, ValueError):  # the file does not exist yet, or is being written
        return 0


def checkpoint_of(job: TrinityJob, step: int) -> Path:
    return job.folder / f"global_step_{step}"


def weights_of(checkpoint: Path) -> list[Path]:
    """Return the weights files of a checkpoint, with transformers' names for tensors."""
    return weights_in(checkpoint / "actor" / "huggingface")


def digest_of(weights: Sequence[Path]) -> str:
    """Return the digest of the names and contents of weights files."""
    digest = hashlib.sha256()
    for path in sorted(weights, key=lambda path: path.name):
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while piece := file.read(_WEIGHTS_CHUNK):
                digest.update(piece)
    return digest.hexdigest()


def _link(source: str | Path, target: str | Path) -> str:
    """Link a file, or copy it where the disk has no links. Trinity and the trainer replace files and never modify
    them."""
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return str(target)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target)


def _touch(path: Path) -> None:
    os.utime(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def pack_weights(lineage: str, weights: Sequence[Path]) -> bytes:
    """Pack the files of weights into bytes, with the lineage's name. Equal files give equal bytes."""
    ordered = sorted(weights, key=lambda path: path.name)
    names = json.dumps([[path.name, path.stat().st_size] for path in ordered])
    return b"".join([_WORD, lineage.encode(), b"\n", names.encode(), b"\n", *(path.read_bytes() for path in ordered)])


def unpack_weights(data: bytes, folder: Path) -> None:
    """Write the files that `pack_weights` packed into `folder`. Raises `SettingError` if `data` has another format."""
    if not data.startswith(_WORD):
        raise SettingError("trainer.backend", "trinity", "the lineage was saved by another back end; keep that one")
    first = data.index(b"\n") + 1
    start = data.index(b"\n", first) + 1
    for name, size in json.loads(data[first:start]):
        if Path(name).name != name:
            raise SettingError("trainer.backend", "trinity", f"the saved lineage names a file {name!r}")
        (folder / name).write_bytes(data[start : start + size])
        start += size


def fingerprint(folder: Path) -> Fingerprint:
    """Compute the fingerprint of the weights in `folder`, on the CPU in float32."""
    import torch

    from headrace_trainer.torch_learner.model.policy import from_folder

    model = from_folder(folder, torch.float32, None).eval()
    token_ids = fingerprint_tokens(int(model.get_input_embeddings().num_embeddings))
    with torch.no_grad():
        logits_TV = model(torch.tensor([token_ids]), use_cache=False).logits[0, :-1].float()
    targets_T = torch.tensor(token_ids[1:])
    logprobs_T = logits_TV.log_softmax(-1).gather(-1, targets_T[:, None]).squeeze(-1)
    return Fingerprint(token_ids=token_ids, logprobs=logprobs_T.tolist())


def is_finite(weights: list[Path]) -> bool:
    """Return whether all numbers in these weights files are finite. It reads them tensor by tensor."""
    from safetensors import safe_open

    for path in weights:
        if path.suffix != ".safetensors":
            continue
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (no dictionary)
                tensor = file.get_tensor(name)
                if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                    return False
    return True
