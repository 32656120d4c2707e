"""Trinity-RFT's benches as a gate program of the registry: `python -m trinity_bench.gate` (docs/gate.md)."""
