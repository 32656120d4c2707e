"""One module per family of topics."""
