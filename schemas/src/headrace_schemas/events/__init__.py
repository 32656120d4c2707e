"""Event classes, one module per family of topics."""
