"""Each algorithm beside an independent result: `python -m tests.algorithms`."""
