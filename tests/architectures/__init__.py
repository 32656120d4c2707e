"""The table of architectures: for each, whether the trainer computes what the model's own attention does."""
