"""Durable checkpoints: shards, manifest, stores, restore choice, cadence, retention.

Decides what a checkpoint on storage looks like, when one counts, which one a restart takes, when
one is due and which ones may go. It deliberately knows nothing of tensors as torch has them, of
processes or of the network: a rank's state arrives as bytes with a description. No torch, no
asyncio; nothing here ever unpickles.

Invariants, cited by tests:
    CK-1  a checkpoint counts from one rename (or one object) on: old or new, never between;
    CK-2  no failure of a save touches a checkpoint that was committed before;
    CK-3  every byte that is handed out has been compared with a recorded checksum;
    CK-4  nothing is deleted that this package did not write itself;
    CK-5  a writer of an older term or generation commits nothing any more.
"""
