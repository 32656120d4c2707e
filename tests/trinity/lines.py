"""What `make test-trinity` promises, line by line."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """One thing that is promised: how many do not keep it."""

    name: str
    broken: int

    def report(self) -> dict[str, object]:
        return {"name": self.name, "value": self.broken, "low": 0, "high": 0, "holds": self.broken == 0}

    def tell(self) -> None:
        print(f"{'FAILS' if self.broken else 'holds'}  {self.broken:5d}  {self.name}", flush=True)
