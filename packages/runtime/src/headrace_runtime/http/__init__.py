"""HTTP server that every service uses, with protection against browsers' cross-site requests and slow clients."""
