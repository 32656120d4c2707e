"""Helpers of tests: real servers on free ports in temporary folders, fakes, and generators of data."""
