"""Interruptions inside steps of every kind of parallelism."""
