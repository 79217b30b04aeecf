"""Images of bulk state: every kind of tensor, in one block of memory, bit for bit."""

from __future__ import annotations

import mmap

import pytest
import torch
from tests.unit.state.toy import Run
from torch import nn

from trainmover.errors import StateMismatch
from trainmover.protocol.carried import Version
from trainmover.protocol.snapshot_image import (
    FREE,
    HEADER_BYTES,
    OLDEST,
    ImageDescription,
    ImageEntry,
    SnapshotImage,
    aligned,
    bulk_digest,
    encode_description,
)
from trainmover.state.inventory import Inventory
from trainmover.state.snapshot import ImageWriter, image_entries, load_entries


class Odd(nn.Module):
    """Tied, 0-dim, empty, bf16, complex, boolean, non-contiguous, negated views."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 5)
        self.tied = self.first
        self.scalar = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.bfloat = nn.Parameter(torch.randn(3, 5).bfloat16())
        self.phase = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.turned = nn.Parameter(torch.randn(6, 4).t())
        self.register_buffer("mask", torch.rand(600_000) > 0.5)
        self.register_buffer("counts", torch.arange(9, dtype=torch.int16))


def odd_inventory(seed: int) -> tuple[Odd, Inventory]:
    torch.manual_seed(seed)
    model = Odd()
    optimizer = torch.optim.Adam([model.first.weight, model.scalar, model.bfloat], foreach=False)
    for parameter in (model.first.weight, model.scalar, model.bfloat):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, Inventory({"model": model, "optimizer": optimizer})


def describe(entries: tuple[ImageEntry, ...], bulk_bytes: int) -> ImageDescription:
    return ImageDescription(
        rank=3,
        world_size=4,
        version=Version(step=7, lineage=2),
        generation=2,
        identity="id",
        run_id="run",
        bulk_bytes=bulk_bytes,
        entries=entries,
        personal=b"own",
        shared=b"shared",
    )


def write(inventory: Inventory) -> tuple[SnapshotImage, ImageDescription]:
    entries, bulk_bytes = image_entries(inventory)
    memory = mmap.mmap(-1, HEADER_BYTES + aligned(bulk_bytes) + (1 << 16))
    image = SnapshotImage(memory)
    image.begin()
    assert not image.is_whole
    ImageWriter(memory).write(inventory, entries)
    description = describe(entries, bulk_bytes)
    image.finish(encode_description(description), bulk_bytes)
    return image, description


def test_every_kind_of_tensor_comes_back_bit_for_bit() -> None:
    _, source = odd_inventory(1)
    image, description = write(source)
    wanted = source.bulk_digests()
    assert image.is_whole
    assert image.read_description() == description
    bulk = image.bulk(description.bulk_bytes)
    assert bulk_digest(bulk, description.entries) == source.bulk_digest()

    _, target = odd_inventory(2)
    assert target.bulk_digests() != wanted

    def read(entry: ImageEntry, view: memoryview) -> None:
        view[:] = bulk[entry.offset : entry.offset + entry.size_bytes]

    amount = load_entries(target, source.manifest(), description.entries, read)
    assert target.bulk_digests() == wanted
    assert amount == sum(entry.size_bytes for entry in description.entries)


def test_an_image_is_what_state_was_although_training_goes_on_at_once() -> None:
    run = Run()
    run.step()
    run.step()
    before = run.inventory.bulk_digest()
    image, description = write(run.inventory)
    run.step()
    assert run.inventory.bulk_digest() != before
    assert bulk_digest(image.bulk(description.bulk_bytes), description.entries) == before


def test_views_follow_when_optimizer_state_appears() -> None:
    run = Run()
    entries, bulk_bytes = image_entries(run.inventory)
    memory = mmap.mmap(-1, 1 << 20)
    writer = ImageWriter(memory)
    writer.write(run.inventory, entries)
    run.step()
    entries, bulk_bytes = image_entries(run.inventory)
    writer.write(run.inventory, entries)
    bulk = SnapshotImage(memory).bulk(bulk_bytes)
    assert bulk_digest(bulk, entries) == run.inventory.bulk_digest()


def test_another_structure_is_refused_by_name() -> None:
    run, (_, odd) = Run(), odd_inventory(1)
    entries, _ = image_entries(run.inventory)
    with pytest.raises(StateMismatch, match="tracked objects differ"):
        load_entries(odd, run.inventory.manifest(), entries, lambda *_: None)


def test_a_reader_sees_that_an_image_was_overwritten() -> None:
    _, inventory = odd_inventory(1)
    image, description = write(inventory)
    seen = image.sequence
    image.begin()
    with pytest.raises(StateMismatch, match="no whole snapshot"):
        image.read_description()
    image.finish(encode_description(description), description.bulk_bytes)
    assert image.is_whole
    assert image.sequence != seen


def test_a_damaged_description_is_not_read() -> None:
    _, inventory = odd_inventory(1)
    image, description = write(inventory)
    image.memory[image.total_bytes - 1] ^= 1
    with pytest.raises(StateMismatch, match="damaged"):
        image.read_description()
    del description


def test_the_hold_is_the_readers_word() -> None:
    _, inventory = odd_inventory(1)
    image, _ = write(inventory)
    assert image.hold == FREE
    image.set_hold(OLDEST)
    assert image.is_whole
    assert image.hold == OLDEST
