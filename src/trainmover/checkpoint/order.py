"""The order of checkpoints: history, never names (C16)."""

from __future__ import annotations

from trainmover.checkpoint.manifest import Manifest


def order_key(manifest: Manifest) -> tuple[int, int, int, int]:
    """History's order within one run: a rolled-back job's later lineage outranks higher steps."""
    return (manifest.lineage, manifest.step, manifest.generation, manifest.term)
