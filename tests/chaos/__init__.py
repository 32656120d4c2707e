"""Chaos tests: kill -9 and other faults of every process under load, and three ledgers that must agree afterwards."""
