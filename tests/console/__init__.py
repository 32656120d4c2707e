"""The console of a running stack: in a real browser, and with planted causes of missing training."""
