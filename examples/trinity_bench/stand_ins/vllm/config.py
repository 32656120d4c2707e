"""See the package."""


class ModelConfig:
    """Named in annotations."""
