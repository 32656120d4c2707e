"""Trinity-RFT's benches as the registry's gate: `python -m trinity_bench.gate` (docs/gate.md)."""
