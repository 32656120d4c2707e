"""One file for each document or part of it. Importing `ALL` announces all programs."""

from tests.parity.programs import article_serving, article_training, copies, scenarios, training_tool, trinity, tuner

ALL = (article_serving, article_training, copies, scenarios, training_tool, trinity, tuner)
