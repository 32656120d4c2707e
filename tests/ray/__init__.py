"""Promises of the back end `ray`, shown with processes."""
