"""See the package."""

MultiModalDataDict = dict
