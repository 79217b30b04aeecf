"""This process's progress page, which its agent has made."""

from __future__ import annotations

import mmap
import os

from trainmover.protocol.progress_page import PAGE_BYTES, ProgressPage


def open_page(path: str) -> ProgressPage:
    """Map the page; the file need not stay open. Raises OSError."""
    handle = os.open(path, os.O_RDWR)
    try:
        return ProgressPage(mmap.mmap(handle, PAGE_BYTES))
    finally:
        os.close(handle)
