"""Tests of the console of a running stack: in a real browser, and with planted reasons for missing training."""
