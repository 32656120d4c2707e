"""Parts that every service process uses: logs, heartbeats, worker threads, and child processes."""
