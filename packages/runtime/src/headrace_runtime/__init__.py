"""Shared library of all Headrace services. Import its modules directly; the package itself has no public names."""
