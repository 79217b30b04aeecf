"""What a new job starts from, decided before any rank exists."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainmover.checkpoint.commit import commit
from trainmover.checkpoint.manifest import Authority
from trainmover.checkpoint.shard_state import RankState
from trainmover.checkpoint.store import open_store
from trainmover.checkpoint.writer import write_rank
from trainmover.daemons.resume import AUTO, NEVER, REQUIRED, check_resume, choose_start
from trainmover.errors import ConfigError, NothingToRestore
from trainmover.protocol.messages import Version
from trainmover.protocol.snapshot_image import ImageEntry
from trainmover.topology.keeping import CheckpointConfig, Keeping


def keeping(place: Path) -> Keeping:
    return Keeping(checkpoint=CheckpointConfig(directory=str(place)))


def save(place: Path, step: int) -> str:
    image = memoryview(bytearray(range(64)))
    state = RankState(
        rank=0,
        world_size=1,
        step=step,
        lineage=1,
        generation=1,
        identity="id",
        entries=(
            ImageEntry(
                name="weight",
                kind="parameter",
                dtype="uint8",
                shape=(64,),
                offset=0,
                size_bytes=64,
                global_shape=(64,),
                global_offset=(0,),
            ),
        ),
        personal=b"own",
        shared=b"shared",
        bulk_digest=1,
        run_id="run",
    )
    store = open_store(place)
    record = write_rank(store, state, image)
    return commit(store, [record], Authority(term=1, generation=1)).name


def test_auto_takes_the_newest_or_starts_anew(tmp_path: Path) -> None:
    assert choose_start(AUTO, keeping(tmp_path / "none")) == (None, [])
    save(tmp_path, 10)
    name = save(tmp_path, 20)
    restored, notes = choose_start(AUTO, keeping(tmp_path))
    assert restored is not None
    assert (restored.name, restored.version) == (name, Version(step=20, lineage=1))
    assert notes == [f"starts from checkpoint {name}, at step 20"]


def test_a_name_and_no_other(tmp_path: Path) -> None:
    name = save(tmp_path, 10)
    save(tmp_path, 20)
    restored, _ = choose_start(name, keeping(tmp_path))
    assert restored is not None
    assert restored.version.step == 10
    with pytest.raises(NothingToRestore):
        choose_start("step-00000099", keeping(tmp_path))


def test_never_and_no_directory_start_anew(tmp_path: Path) -> None:
    save(tmp_path, 10)
    assert choose_start(NEVER, keeping(tmp_path)) == (None, [])
    assert choose_start(AUTO, Keeping()) == (None, [])


def test_nothing_valid_where_it_is_required_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NothingToRestore):
        choose_start(REQUIRED, keeping(tmp_path))


def test_a_damaged_one_is_passed_over_and_named(tmp_path: Path) -> None:
    first, second = save(tmp_path, 10), save(tmp_path, 20)
    (shard,) = (tmp_path / second).glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    restored, notes = choose_start(AUTO, keeping(tmp_path))
    assert restored is not None
    assert restored.name == first
    assert second in notes[0]


def test_words_without_a_directory_are_refused() -> None:
    with pytest.raises(ConfigError, match="--checkpoints DIR"):
        check_resume(REQUIRED, Keeping())
    check_resume(AUTO, Keeping())
