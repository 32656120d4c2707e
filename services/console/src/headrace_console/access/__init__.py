"""Logins, their sessions, and the security headers of every response."""
