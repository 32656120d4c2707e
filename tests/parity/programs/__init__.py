"""One file for each document or part of it. Importing `ALL` announces all programs."""

from tests.parity.programs import article_training, training_tool, tuner

ALL = (article_training, training_tool, tuner)
