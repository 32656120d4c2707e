"""Screens of the console: one module each."""
