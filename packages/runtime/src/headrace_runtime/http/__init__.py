"""HTTP server of every service, and the checks of its callers."""
