"""Fixtures of the emergency tests."""

from __future__ import annotations

from tests.process.emergency.jobs import slow_library

__all__ = ["slow_library"]
