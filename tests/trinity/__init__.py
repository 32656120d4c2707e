"""Promises of the back end `trinity`: Trinity's own reader reads our rows."""
