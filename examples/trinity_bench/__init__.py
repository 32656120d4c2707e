"""Trinity-RFT's benches as a gate."""
