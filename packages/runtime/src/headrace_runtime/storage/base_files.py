"""Base models from single files: a file inside of an installed package, and a GGUF file, which is converted.

A GGUF file is converted once into `models/<name>-<digest>` of the data directory by a program of the trainer, in a
process of its own. Its weights are stored in float32, so the folder is up to eight times as large as a file of four
bits a weight. The file `headrace_origin.json` of the folder names the source, its digest and its package.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path, PurePosixPath

from headrace_runtime.errors import SettingError
from headrace_runtime.process import liveness
from headrace_runtime.process.logs import get_logger
from headrace_runtime.process.parent_death import parent_bound_command
from headrace_runtime.process.programs import program_environment
from headrace_runtime.services import installed_services
from headrace_runtime.storage import disk
from headrace_runtime.storage.blobs import digest_of
from headrace_schemas.values.text import printable

log = get_logger(__name__)
SETTING = "trainer.base"
ORIGIN_FILE = "headrace_origin.json"
GGUF = ".gguf"
PACKAGE = "package:"
_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_DIGEST_LENGTH = 12
_GROWTH_MAX = 16
"""Maximum size of the converted weights as a multiple of the file's size: two bits per weight become 32."""
_WAIT_S = 1.0
_ERROR_LENGTH = 1000


def find_file(base: str) -> Path | None:
    """Return the GGUF file that `base` names, or the file or folder that it names in an installed package; None for
    other forms.

    Raises:
        SettingError: the package is not installed, or contains no such file.
    """
    if base.startswith(PACKAGE):
        return _packaged_path(base)
    return Path(base) if base.endswith(GGUF) and Path(base).is_file() else None


def find_converted(source: Path, data_dir: Path) -> Path | None:
    """Return the folder to which a GGUF file was converted before, or None. Blocks."""
    folder = _converted_folder(source, digest_of(source)[0], data_dir)
    return folder if (folder / ORIGIN_FILE).is_file() else None


def convert(base: str, source: Path, data_dir: Path) -> Path:
    """Convert a GGUF file, unless that was done before, and return the folder in the data directory. Blocks.

    Args:
        base: the value of the setting `trainer.base`, for messages.
        source: the GGUF file.
        data_dir: the data directory.

    Raises:
        SettingError: the file cannot be converted, or the trainer is not installed.
        Unavailable: the disk has too little space.
    """
    digest, size = digest_of(source)
    folder = _converted_folder(source, digest, data_dir)
    if (folder / ORIGIN_FILE).is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    disk.check_room(folder.parent, size * _GROWTH_MAX)
    log.info("converting_base", base=base, megabytes=size // 1_000_000, stored_as="float32")
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        notes = _run_converter(base, source, draft)
        origin = {"file": source.name, "sha256": digest, **_package_of(base), **notes}
        (draft / ORIGIN_FILE).write_text(json.dumps(origin) + "\n", encoding="utf-8")
        if not folder.exists():  # another process may have converted it at the same time
            draft.replace(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    stored = sum(path.stat().st_size for path in folder.iterdir())
    log.info("base_converted", base=base, folder=str(folder), megabytes=stored // 1_000_000, **notes)
    return folder


def _converted_folder(source: Path, digest: str, data_dir: Path) -> Path:
    return data_dir / "models" / f"{source.stem}-{digest[:_DIGEST_LENGTH]}"


def _packaged_path(base: str) -> Path:
    name, _, inside = base.removeprefix(PACKAGE).partition("/")
    parts = PurePosixPath(inside).parts
    if not _NAME.fullmatch(name) or not parts or ".." in parts or inside.startswith("/"):
        raise SettingError(SETTING, base, f"must be {PACKAGE}NAME/PATH, with a path inside of the package")
    try:
        spec = importlib.util.find_spec(name.partition(".")[0])
    except (ImportError, ValueError):
        spec = None
    folders = list(spec.submodule_search_locations or ()) if spec else []
    if not folders:
        raise SettingError(SETTING, base, f"no package {name!r} is installed; install it in this environment")
    for folder in folders:
        root = Path(folder, *name.split(".")[1:]).resolve()
        path = root.joinpath(*parts).resolve()
        if path.exists() and path.is_relative_to(root):
            if path.is_dir() or path.suffix == GGUF:
                return path
            raise SettingError(SETTING, base, f"must name a folder or a {GGUF} file of the package")
    raise SettingError(SETTING, base, f"the package {name!r} has no such file; list it in {Path(folders[0]).parent}")


def _package_of(base: str) -> dict[str, str]:
    """Return name and version of the distribution that contains the package of `base`; an empty dict if `base` names no
    package."""
    if not base.startswith(PACKAGE):
        return {}
    name = base.removeprefix(PACKAGE).partition("/")[0].partition(".")[0]
    for distribution in importlib.metadata.packages_distributions().get(name, ()):
        return {"package": distribution, "package_version": importlib.metadata.version(distribution)}
    return {"package": name}


def _run_converter(base: str, source: Path, folder: Path) -> dict[str, str]:
    """Run the trainer's conversion of a GGUF file as a child process. Return its notes about the model."""
    trainer = installed_services().get("trainer")
    if trainer is None:
        raise SettingError(SETTING, base, "a GGUF file is converted by the trainer; install headrace[local]")
    command = [sys.executable, "-m", f"{trainer.module}.gguf", str(source.absolute()), str(folder.absolute())]
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            parent_bound_command(command), stdout=subprocess.PIPE, stderr=errors, env=program_environment()
        )
        output = b""
        while True:
            try:
                output = process.communicate(timeout=_WAIT_S)[0]
                break
            except subprocess.TimeoutExpired:
                liveness.progress()
        if process.returncode != 0:
            errors.seek(0)
            lines = errors.read().decode(errors="replace").strip().splitlines() or [f"status {process.returncode}"]
            raise SettingError(SETTING, base, f"cannot be converted: {printable(lines[-1], _ERROR_LENGTH)}")
    notes: dict[str, str] = json.loads(output)
    return notes
