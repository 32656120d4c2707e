"""Example of a third-party package that extends Headrace by entry points."""
