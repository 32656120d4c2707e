"""One file for each document or part of it. Importing this package announces all programs."""

from tests.parity.programs import article_serving, article_training, scenarios, training_tool, trinity, tuner

__all__ = ["article_serving", "article_training", "scenarios", "training_tool", "trinity", "tuner"]
