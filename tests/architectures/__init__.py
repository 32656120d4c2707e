"""The table of architectures: for each, whether the trainer's results are those of the model's own attention."""
