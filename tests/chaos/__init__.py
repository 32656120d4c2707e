"""kill -9 of everything under load: `python -m tests.chaos`, and three ledgers that must agree afterwards."""
