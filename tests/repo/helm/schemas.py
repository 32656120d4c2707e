"""Collect the JSON schemas for rendered charts: `python -m tests.repo.helm.schemas FOLDER MODULE@VERSION...`.

The schemas of Kubernetes come from the package kubernetes-validate in the environment FOLDER. Those of custom resources
come from the definitions in Go modules, which Go's checksum database verifies. FOLDER/schemas has the layout that
kubeconform reads.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

VERSIONS = ("1.29.0", "1.34.0")
"""Of Kubernetes: the oldest that the chart is for, and the newest that the package knows."""
KINDS = {"keda.sh_scaledobjects", "monitoring.coreos.com_servicemonitors", "monitoring.coreos.com_prometheusrules"}
_ELSEWHERE, _BESIDE = "/api/_definitions.json", "_definitions.json"


def main(folder: Path, modules: list[str]) -> None:
    target = folder / "schemas"
    shutil.rmtree(target, ignore_errors=True)
    source = next(folder.glob("lib/python*/site-packages/kubernetes_validate/kubernetes-json-schema"))
    for version in VERSIONS:
        version_folder = target / f"v{version}"
        version_folder.mkdir(parents=True)
        for path in (source / f"v{version}-local-strict").glob("*.json"):
            schema = json.loads(path.read_text(encoding="utf-8").replace(_ELSEWHERE, _BESIDE))
            schema.pop("$id", None)  # references are to the files beside it
            (version_folder / path.name).write_text(json.dumps(schema), encoding="utf-8")
    (target / "custom").mkdir()
    for module in modules:
        for path in _module_folder(module).rglob("*.yaml"):
            if path.stem in KINDS:
                _custom(yaml.safe_load(path.read_text(encoding="utf-8")), target / "custom")
    missing = len(KINDS) - len(list((target / "custom").iterdir()))
    if missing:
        sys.exit(f"{missing} of {', '.join(sorted(KINDS))} are in none of {', '.join(modules)}")


def _module_folder(module: str) -> Path:
    command = ["go", "mod", "download", "-json", module]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        sys.exit(f"{' '.join(command)} failed: {process.stderr.strip() or process.stdout.strip()}")
    return Path(json.loads(process.stdout)["Dir"])


def _custom(definition: dict[str, Any], target: Path) -> None:
    """Write one schema file for each kind, from the last version of its definition."""
    spec = definition["spec"]
    for version in spec["versions"]:
        name = f"{spec['names']['kind'].lower()}-{spec['group'].split('.')[0]}-{version['name']}.json"
        schema = strict(version["schema"]["openAPIV3Schema"])
        (target / name).write_text(json.dumps(schema), encoding="utf-8")


def strict(schema: Any) -> Any:
    """Return the schema with `additionalProperties` refused, because a server silently drops unknown names."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {name: strict(part) for name, part in schema.items()}
    open_ended = inner.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in inner
    if isinstance(inner.get("properties"), dict) and inner.get("type") == "object" and not open_ended:
        inner["additionalProperties"] = False
    return inner


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), sys.argv[2:])
