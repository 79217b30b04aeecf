"""Every flipped bit is found, by verifying and by reading, and named (CK-3; C40)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.unit.checkpoint.sample import local, make, save

from trainmover.checkpoint.reader import open_checkpoint
from trainmover.checkpoint.survey import survey
from trainmover.checkpoint.tiers import pick
from trainmover.errors import CheckpointError, ManifestCorrupt, ManifestMissing, NothingToRestore

WORLD = 2


def flip(path: Path, position: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return tmp_path / save(local(tmp_path), 10, world_size=WORLD).name


def test_a_bit_anywhere_in_the_manifest(saved: Path) -> None:
    """Each byte of the manifest, one flipped bit at a time."""
    manifest = saved / "MANIFEST.json"
    good = manifest.read_bytes()
    for position in range(len(good)):
        flip(manifest, position, position % 8)
        with pytest.raises((ManifestCorrupt, ManifestMissing)):
            open_checkpoint(local(saved.parent), saved.name)
        manifest.write_bytes(good)


@pytest.mark.parametrize("cut", [0, 1, 100, -1])
def test_a_cut_manifest(saved: Path, cut: int) -> None:
    manifest = saved / "MANIFEST.json"
    data = manifest.read_bytes()
    manifest.write_bytes(data[:cut] if cut >= 0 else data + b"x")
    with pytest.raises(ManifestCorrupt):
        open_checkpoint(local(saved.parent), saved.name)


def everything(store_path: Path, name: str) -> None:
    """Read all that a restore reads."""
    checkpoint = open_checkpoint(local(store_path), name)
    for rank in range(WORLD):
        state, image = make(rank, WORLD, 10)
        assert checkpoint.rank_state(rank) == state
        buffer = bytearray(len(image))
        checkpoint.read_image(rank, memoryview(buffer))
        for entry in state.entries:
            end = entry.offset + entry.size_bytes
            assert buffer[entry.offset : end] == image[entry.offset : end]


def test_a_bit_anywhere_in_any_shard(saved: Path) -> None:
    """Every 13th byte of every file, and the first and last: found by both, never handed out."""
    for path in sorted(saved.glob("rank-*")):
        size = path.stat().st_size
        for position in sorted({*range(0, size, 13), size - 1}):
            flip(path, position, position % 8)
            assert_found(saved, path.name)
            flip(path, position, position % 8)
    everything(saved.parent, saved.name)


def assert_found(saved: Path, file: str) -> None:
    """Both ways to read find that `file` is damaged."""
    damaged = open_checkpoint(local(saved.parent), saved.name).verify()
    assert [item.path for item in damaged] == [file]
    with pytest.raises(CheckpointError, match=file):
        everything(saved.parent, saved.name)


def test_the_entry_is_named(saved: Path) -> None:
    checkpoint = open_checkpoint(local(saved.parent), saved.name)
    file = next(f for f in checkpoint.manifest.files if f.path == "rank-00001.safetensors")
    for placed in checkpoint._files.pieces(file):
        if placed.piece.size_bytes == 0:
            continue
        flip(saved / file.path, placed.position + placed.piece.size_bytes // 2)
        damaged = open_checkpoint(local(saved.parent), saved.name).verify()
        assert placed.piece.name in damaged[0].reason
        with pytest.raises(CheckpointError, match=f"{placed.piece.name} differs"):
            everything(saved.parent, saved.name)
        flip(saved / file.path, placed.position + placed.piece.size_bytes // 2)


def test_swapped_shards(saved: Path) -> None:
    """C40: two files of equal size in each other's place."""
    first, second = saved / "rank-00000.msgpack", saved / "rank-00001.msgpack"
    keep = saved.parent / "keep"
    first.rename(keep)
    second.rename(first)
    keep.rename(second)
    damaged = open_checkpoint(local(saved.parent), saved.name).verify()
    assert [item.path for item in damaged] == ["rank-00000.msgpack", "rank-00001.msgpack"]


def test_stripped_checksums(saved: Path) -> None:
    """C40: the absence of a checksum is never fine."""
    from trainmover.checkpoint import hashing

    manifest = saved / "MANIFEST.json"
    body = manifest.read_bytes().split(b'"manifest":', 1)[1].rstrip()[:-1]
    sum_of_first = open_checkpoint(local(saved.parent), saved.name).manifest.files[0].xxh3
    body = body.replace(sum_of_first.encode(), b"")
    manifest.write_bytes(
        b'{"checksum":"%s","manifest":%s}\n' % (hashing.checksum(body).encode(), body)
    )
    with pytest.raises(ManifestCorrupt, match="no checksum"):
        open_checkpoint(local(saved.parent), saved.name)


@pytest.mark.parametrize("name", ["rank-00001.msgpack", "rank-00001.safetensors"])
def test_a_missing_part_rejects_the_whole(tmp_path: Path, name: str) -> None:
    """C07: one rank's file is gone: all ranks take the checkpoint before."""
    save(local(tmp_path), 10)
    twenty = save(local(tmp_path), 20)
    (tmp_path / twenty.name / name).unlink()
    chosen = pick({"durable": local(tmp_path)})
    assert chosen is not None and chosen.manifest.step == 10
    assert name in chosen.passed_over[0].reason


def test_copies(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """C11: a plain copy loads; one whose names changed case is refused with its reason."""
    copied = tmp_path_factory.mktemp("copied")
    shutil.copytree(saved, copied / saved.name, copy_function=shutil.copyfile)
    everything(copied, saved.name)
    dotless = tmp_path_factory.mktemp("dotless")
    shutil.copytree(saved, dotless / saved.name, ignore=shutil.ignore_patterns(".*"))
    everything(dotless, saved.name)
    renamed = tmp_path_factory.mktemp("renamed")
    shutil.copytree(saved, renamed / "best")
    everything(renamed, "best")
    lower = tmp_path_factory.mktemp("lower")
    shutil.copytree(saved, lower / saved.name)
    (lower / saved.name / "MANIFEST.json").rename(lower / saved.name / "manifest.json")
    assert "changed the case" in survey(local(lower)).rejected[0].reason
    with pytest.raises(NothingToRestore, match="changed the case"):
        pick({"durable": local(lower)})


def test_a_manifest_never_leads_outside(saved: Path) -> None:
    from trainmover.checkpoint import hashing

    manifest = saved / "MANIFEST.json"
    body = manifest.read_bytes().split(b'"manifest":', 1)[1].rstrip()[:-1]
    body = body.replace(b"rank-00000.msgpack", b"../../etc/passwd..")
    manifest.write_bytes(
        b'{"checksum":"%s","manifest":%s}\n' % (hashing.checksum(body).encode(), body)
    )
    with pytest.raises(ManifestCorrupt, match="is no file of a checkpoint"):
        open_checkpoint(local(saved.parent), saved.name)
