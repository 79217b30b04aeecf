"""Files open without trainmover: the stock library, torch, and the reader printed in the docs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tests.unit.checkpoint.sample import TENSORS, local, make, save, whole_bytes

from trainmover.checkpoint.commit import commit
from trainmover.checkpoint.export import ExportOptions, export_safetensors
from trainmover.checkpoint.manifest import Authority
from trainmover.checkpoint.reader import open_checkpoint
from trainmover.checkpoint.safetensors_format import DTYPES
from trainmover.checkpoint.shard_state import RankState
from trainmover.checkpoint.writer import WriteOptions, write_rank
from trainmover.errors import LayoutMismatch
from trainmover.protocol.snapshot_image import ImageEntry

PAGE = Path(__file__).parents[3] / "docs" / "checkpoints.md"


def raw(tensor: torch.Tensor) -> bytes:
    """A tensor's bytes, whatever its dtype."""
    if tensor.numel() == 0:
        return b""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def as_saved(name: str, shape: tuple[int, ...]) -> torch.Size:
    return torch.Size((*shape, 2) if name == "wide" else shape)


@pytest.mark.parametrize("options", [None, WriteOptions(split_bytes=64)], ids=["whole", "split"])
def test_the_stock_library(tmp_path: Path, options: WriteOptions | None) -> None:
    """Every dtype and shape, each rank's own part, aligned."""
    found = save(local(tmp_path), 10, world_size=2, options=options)
    for rank in range(2):
        state, image = make(rank, 2, 10)
        pieces = pieces_of(tmp_path / found.name, rank)
        for entry in state.entries:
            expected = bytes(image[entry.offset : entry.offset + entry.size_bytes])
            assert b"".join(map(raw, pieces[entry.name])) == expected
            whole = pieces[entry.name]
            if len(whole) == 1:
                assert whole[0].shape == as_saved(entry.name, entry.shape)


def pieces_of(folder: Path, rank: int) -> dict[str, list[torch.Tensor]]:
    """A rank's tensors as the stock library reads them; several where one was split."""
    pieces: dict[str, list[torch.Tensor]] = {}
    for file in sorted(folder.glob(f"rank-{rank:05d}*.safetensors")):
        for name, tensor in load_file(file).items():
            pieces.setdefault(name, []).append(tensor)
    return pieces


def test_the_reader_in_the_docs(tmp_path: Path) -> None:
    """It is run as printed, and gives the tensors and their places."""
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert code is not None
    space: dict[str, object] = {}
    exec(code.group(1), space)
    found = save(local(tmp_path), 10, world_size=2)
    path = tmp_path / found.name / "rank-00001.safetensors"
    tensors, places = space["read"](path)  # type: ignore[operator]
    stock = load_file(path)
    assert tensors.keys() == stock.keys()
    for name, tensor in tensors.items():
        assert (tensor.dtype, tensor.shape) == (stock[name].dtype, stock[name].shape)
        assert raw(tensor) == raw(stock[name])
    assert places["model.weight"] == [3, 0]


def test_metadata_is_readable(tmp_path: Path) -> None:
    found = save(local(tmp_path), 10, world_size=2)
    with safe_open(tmp_path / found.name / "rank-00001.safetensors", "pt") as file:
        metadata = file.metadata()
        assert metadata["format"] == "pt" and metadata["step"] == "10"
        pieces = {piece["name"]: piece for piece in json.loads(metadata["trainmover"])["pieces"]}
    assert pieces["model.half"]["global_offset"] == [4, 0]
    assert pieces["wide"]["dtype"] == "complex128"


@pytest.mark.parametrize("split", [5_000_000_000, 150], ids=["one file", "several"])
def test_an_export_is_whole(tmp_path: Path, split: int) -> None:
    """B9: gathered from 3 ranks, in saved dtypes, with the index that other tools write."""
    found = save(local(tmp_path / "root"), 10, world_size=3)
    out = tmp_path / "out"
    kinds = frozenset({"parameter", "buffer", "optimizer", "object"})
    options = ExportOptions(kinds=kinds, split_bytes=split)
    checkpoint = open_checkpoint(local(tmp_path / "root"), found.name)
    done = export_safetensors(checkpoint, local(out), options)
    tensors: dict[str, torch.Tensor] = {}
    for file in done.files:
        tensors.update(load_file(out / file))
    for tensor in TENSORS:
        assert raw(tensors[tensor.name]) == whole_bytes(tensor, 10)
        assert tensors[tensor.name].shape == as_saved(tensor.name, tensor.shape)
    if len(done.files) > 1:
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"]) == {tensor.name for tensor in TENSORS}
        assert set(index["weight_map"].values()) == set(done.files)
    assert done.conflicts == ()


def test_every_dtype_of_torch_is_held_or_refused(tmp_path: Path) -> None:
    """C67: no dtype is changed; what can't be held is refused by name when it is saved."""
    for dtype in sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str):
        name = str(dtype).removeprefix("torch.")
        size = DTYPES[name][1] if name in DTYPES else dtype.itemsize
        entry = ImageEntry(
            name="t",
            kind="object",
            dtype=name,
            shape=(3,),
            offset=0,
            size_bytes=3 * size,
            global_shape=(3,),
            global_offset=(0,),
        )
        state = RankState(
            rank=0,
            world_size=1,
            step=1,
            lineage=1,
            generation=1,
            identity="",
            entries=(entry,),
            personal=b"",
            shared=b"",
            bulk_digest=0,
            run_id=name,
        )
        image = memoryview(bytes(range(3 * size)) if size <= 16 else b"")
        store = local(tmp_path / name)
        if name not in DTYPES:
            with pytest.raises(LayoutMismatch, match=f"t is {name}"):
                write_rank(store, state, image)
            continue
        found = commit(store, [write_rank(store, state, image)], Authority(term=1, generation=1))
        read = load_file(tmp_path / name / found.name / "rank-00000.safetensors")["t"]
        assert raw(read) == bytes(image)
        assert read.dtype == (torch.float64 if name == "complex128" else dtype)
