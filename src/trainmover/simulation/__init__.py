"""Seeded worlds that run the real deciders under faults. Nothing real happens here."""
