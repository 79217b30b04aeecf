"""What was saved is what is read: whole ranks, single entries, parts, at every world size."""

from __future__ import annotations

import itertools
from math import prod
from pathlib import Path

import pytest
from tests.unit.checkpoint.sample import TENSORS, Tensor, local, make, part, save, whole_bytes

from trainmover.checkpoint.commit import commit
from trainmover.checkpoint.manifest import Authority
from trainmover.checkpoint.reader import open_checkpoint
from trainmover.checkpoint.safetensors_format import element_bytes
from trainmover.checkpoint.writer import WriteOptions, write_rank
from trainmover.errors import CheckpointError, LayoutMismatch

TINY_FILES = WriteOptions(split_bytes=40, chunk_bytes=7)


@pytest.mark.parametrize("options", [None, TINY_FILES], ids=["whole", "split"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_rank_comes_back(tmp_path: Path, world_size: int, options: WriteOptions) -> None:
    """B1, B3; C71: scalars, empty shards, (0, 4), (1, 17)."""
    found = save(local(tmp_path), 10, world_size=world_size, options=options)
    checkpoint = open_checkpoint(local(tmp_path), found.name)
    for rank in range(world_size):
        state, image = make(rank, world_size, 10)
        assert checkpoint.rank_state(rank) == state
        assert checkpoint.read_personal(rank) == state.personal
        assert checkpoint.read_shared(rank) == state.shared
        buffer = bytearray(b"\xee" * len(image))
        checkpoint.read_image(rank, memoryview(buffer))
        assert buffer == image
        for entry in state.entries:
            one = bytearray(entry.size_bytes)
            checkpoint.read_entry(rank, entry.name, memoryview(one))
            assert one == image[entry.offset : entry.offset + entry.size_bytes]


def test_files_are_split(tmp_path: Path) -> None:
    """B3: an entry larger than a file is cut between rows, smaller ones are gathered."""
    found = save(local(tmp_path), 10, world_size=1, options=TINY_FILES)
    bulk = [file for file in found.manifest.files if file.header_bytes]
    assert len(bulk) > len(TENSORS)
    assert all(file.size_bytes - file.header_bytes <= max(40, 136) for file in bulk)


@pytest.mark.parametrize("options", [None, TINY_FILES], ids=["whole", "split"])
@pytest.mark.parametrize("saved", [1, 2, 3, 4])
@pytest.mark.parametrize("loaded", [1, 2, 3, 4, 7])
def test_another_world_size(
    tmp_path: Path, saved: int, loaded: int, options: WriteOptions | None
) -> None:
    """B9, C71, C76: each new rank gets exactly its rows."""
    found = save(local(tmp_path), 10, world_size=saved, options=options)
    checkpoint = open_checkpoint(local(tmp_path), found.name)
    for tensor in TENSORS:
        row = prod(tensor.shape[1:]) * element_bytes(tensor.dtype, tensor.name)
        for rank in range(loaded):
            first, count = part(tensor, rank, loaded)
            shape = (count, *tensor.shape[1:]) if tensor.shape else ()
            offset = (first, *[0] * (len(tensor.shape) - 1)) if tensor.shape else ()
            data = checkpoint.assemble(tensor.name, offset, shape)
            assert data == whole_bytes(tensor, 10)[first * row : (first + count) * row]


@pytest.mark.parametrize("length", [0, 1, 2, 3, 5, 6, 7, 17])
def test_lengths_that_do_not_divide(tmp_path: Path, length: int) -> None:
    """C71: lengths 0 to 17 on 1 to 4 ranks, read at every other number."""
    tensor = Tensor(name="t", dtype="int16", shape=(length,), is_sharded=True)
    for saved in (1, 2, 3, 4):
        store = local(tmp_path / str(saved))
        found = save(store, 10, world_size=saved, tensors=[tensor])
        checkpoint = open_checkpoint(store, found.name)
        for loaded in (1, 2, 3, 4):
            parts = [part(tensor, rank, loaded) for rank in range(loaded)]
            read = [checkpoint.assemble("t", (first,), (count,)) for first, count in parts]
            assert b"".join(read) == whole_bytes(tensor, 10)


def test_replicas_write_bulk_once(tmp_path: Path) -> None:
    """Ranks of one identity share one bulk file; personal state is each rank's own."""
    tensor = Tensor(name="t", dtype="int32", shape=(4, 2))
    records = []
    for rank in range(3):
        state, image = make(rank, 3, 10, tensors=[tensor], identity="all")
        options = WriteOptions(writes_bulk=rank == 1)
        records.append(write_rank(local(tmp_path), state, image, options=options))
    found = commit(local(tmp_path), records, Authority(term=1, generation=1))
    bulk = [file for file in found.manifest.files if file.header_bytes]
    assert [file.rank for file in bulk] == [1]
    checkpoint = open_checkpoint(local(tmp_path), found.name)
    for rank in range(3):
        state, image = make(rank, 3, 10, tensors=[tensor], identity="all")
        buffer = bytearray(len(image))
        checkpoint.read_image(rank, memoryview(buffer))
        assert buffer == image
        assert checkpoint.read_personal(rank) == state.personal


def test_layout_tells_the_mesh(tmp_path: Path) -> None:
    found = save(local(tmp_path), 10, world_size=2)
    grids = {entry.name: entry.grid for entry in found.manifest.layout}
    assert grids["model.weight"] == (2, 1)
    assert grids["optimizer.step"] == ()
    assert grids["count"] == (1, 1)
    assert set(grids) == {tensor.name for tensor in TENSORS}


def test_two_dimensional_cuts(tmp_path: Path) -> None:
    """A tensor cut 2 x 2 (FSDP2 over TP) is read as rows, as columns, and as a window."""
    from tests.unit.checkpoint.sample import RUN

    from trainmover.checkpoint.shard_state import RankState
    from trainmover.protocol.snapshot_image import ImageEntry

    rows, columns = 5, 6
    whole = bytes(range(rows * columns))
    records = []
    for rank in range(4):
        top, left = 3 * (rank // 2), 3 * (rank % 2)
        height, width = (3, 2)[rank // 2], 3
        image = b"".join(
            whole[(top + r) * columns + left : (top + r) * columns + left + width]
            for r in range(height)
        )
        entry = ImageEntry(
            name="t",
            kind="parameter",
            dtype="uint8",
            shape=(height, width),
            offset=0,
            size_bytes=len(image),
            global_shape=(rows, columns),
            global_offset=(top, left),
            is_sharded=True,
        )
        state = RankState(
            rank=rank,
            world_size=4,
            step=1,
            lineage=1,
            generation=1,
            identity=str(rank),
            entries=(entry,),
            personal=b"",
            shared=b"",
            bulk_digest=0,
            run_id=RUN,
        )
        records.append(write_rank(local(tmp_path), state, memoryview(image)))
    found = commit(local(tmp_path), records, Authority(term=1, generation=1))
    assert found.manifest.layout[0].grid == (2, 2)
    checkpoint = open_checkpoint(local(tmp_path), found.name)
    windows = itertools.product(range(rows), range(columns), range(rows + 1), range(columns + 1))
    for top, left, height, width in windows:
        if top + height > rows or left + width > columns:
            continue
        lines = [(top + row) * columns + left for row in range(height)]
        expected = b"".join(whole[first : first + width] for first in lines)
        assert checkpoint.assemble("t", (top, left), (height, width)) == expected


def test_wrong_questions_are_answered_by_name(tmp_path: Path) -> None:
    found = save(local(tmp_path), 10)
    checkpoint = open_checkpoint(local(tmp_path), found.name)
    with pytest.raises(LayoutMismatch, match="no tensor model.wieght"):
        checkpoint.assemble("model.wieght", (0, 0), (1, 1))
    with pytest.raises(LayoutMismatch, match="the whole is"):
        checkpoint.assemble("model.weight", (5, 0), (2, 5))
    with pytest.raises(LayoutMismatch, match="the buffer 3"):
        checkpoint.read_entry(0, "model.weight", memoryview(bytearray(3)))
    with pytest.raises(CheckpointError, match="no rank 2"):
        checkpoint.rank_state(2)


def test_names_are_only_names(tmp_path: Path) -> None:
    """C69: dots, slashes, 300 characters, case: nothing leaves the directory, all come back."""
    odd = [
        "a/b",
        "../../x",
        "..",
        ".",
        " ",
        "x" * 300,
        "Case",
        "case",
        "\u00e9\n",
        "a.b.c",
        '"',
        "~",
    ]
    tensors = [Tensor(name=name, dtype="int8", shape=(2,)) for name in odd]
    found = save(local(tmp_path / "root"), 10, world_size=1, tensors=tensors)
    checkpoint = open_checkpoint(local(tmp_path / "root"), found.name)
    for tensor in tensors:
        assert checkpoint.assemble(tensor.name, (0,), (2,)) == whole_bytes(tensor, 10)
    assert [path.name for path in tmp_path.iterdir()] == ["root"]
    files = {path.name for path in (tmp_path / "root" / found.name).iterdir()}
    assert files == {"MANIFEST.json", "rank-00000.msgpack", "rank-00000.safetensors"}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"size_bytes": 7}, "has 8"),
        ({"offset": 100}, "of an image of"),
        ({"dtype": "complex32"}, "can't hold"),
        ({"global_shape": (2, 1)}, "differ in dimensions"),
        ({"name": "__metadata__"}, "is taken"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, change: dict[str, object], expected: str
) -> None:
    """B1: what can't be saved is an error when it is saved, by name."""
    import msgspec

    state, image = make(0, 1, tensors=[Tensor(name="t", dtype="int32", shape=(2,))])
    entry = msgspec.structs.replace(state.entries[0], **change)
    with pytest.raises(LayoutMismatch, match=expected):
        write_rank(local(tmp_path), msgspec.structs.replace(state, entries=(entry,)), image)


def test_a_repetition_is_known(tmp_path: Path) -> None:
    """C23: another step with the very same tensors is worth an alarm."""
    import msgspec

    first, second = save(local(tmp_path), 10).manifest, save(local(tmp_path), 20).manifest
    assert not second.repeats(first)
    same = msgspec.structs.replace(second, ranks=first.ranks)
    assert same.repeats(first)


def test_records_that_do_not_fit_together(tmp_path: Path) -> None:
    """C31: no checkpoint mixes steps; a rank or a bulk state that nobody wrote is told."""
    now = Authority(term=1, generation=1)
    store = local(tmp_path)
    records = [write_rank(store, *make(rank, 2, 10)) for rank in range(2)]
    other = write_rank(store, *make(1, 2, 20))
    silent = write_rank(store, *make(1, 2, 10), options=WriteOptions(writes_bulk=False))
    for wrong, expected in (
        ([records[0], other], "different steps"),
        (records[:1], "one shard record of each rank"),
        ([], "without shards"),
        ([records[0], silent], r"nobody wrote the bulk state of ranks \[1\]"),
    ):
        with pytest.raises(CheckpointError, match=expected):
            commit(store, wrong, now)
