"""The process of a service: logs, signs of life, threads, and the programs that it starts."""
