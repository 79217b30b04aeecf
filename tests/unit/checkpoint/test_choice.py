"""What a restart takes: newest valid, for the whole group, and never silently nothing."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.unit.checkpoint.sample import local, make, save

from trainmover.checkpoint.choice import Asked, Found, Passed, choose
from trainmover.checkpoint.manifest import Manifest
from trainmover.checkpoint.names import name_of
from trainmover.checkpoint.reader import open_checkpoint
from trainmover.checkpoint.tiers import open_named, pick
from trainmover.errors import NothingToRestore, ShardCorrupt


@pytest.fixture(scope="module")
def manifests(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Manifest]:
    """A few committed checkpoints, by name."""
    store = local(tmp_path_factory.mktemp("store"))
    saved = [
        save(store, 10),
        save(store, 20),
        save(store, 30, is_suspect=True),
        save(store, 100, lineage=1),
        save(store, 40, lineage=2, generation=2),
        save(store, 15, run_id="another"),
    ]
    return {c.name: c.manifest for c in saved}


def found(manifest: Manifest, tier: str = "durable", *broken: str) -> Found:
    name = name_of(manifest)
    return Found(tier=tier, name=name, manifest=manifest, broken=dict.fromkeys(broken, "bad"))


def at(manifests: Mapping[str, Manifest], step: int) -> Manifest:
    return next(m for m in manifests.values() if m.step == step)


SHARD = "rank-00001.safetensors"


def test_history_outranks_names_and_steps(manifests: Mapping[str, Manifest]) -> None:
    """After a roll-back the later lineage is the job's history, whatever steps were abandoned."""
    items = [found(at(manifests, step)) for step in (10, 100, 40, 20)]
    random.Random(3).shuffle(items)
    chosen = choose(items)
    assert chosen is not None and chosen.manifest.step == 40


def test_a_broken_file_comes_from_another_tier(manifests: Mapping[str, Manifest]) -> None:
    """C142: sources are chosen for the group; the report says which tier serves what."""
    twenty = at(manifests, 20)
    chosen = choose([found(twenty, "disk", SHARD), found(twenty, "durable")])
    assert chosen is not None and chosen.manifest.step == 20
    sources = dict(chosen.sources)
    assert sources.pop(SHARD) == "durable"
    assert set(sources.values()) == {"disk"}
    assert chosen.tiers() == ("disk", "durable")


def test_disks_of_machines_complete_each_other(manifests: Mapping[str, Manifest]) -> None:
    twenty = at(manifests, 20)
    files = [file.path for file in twenty.files]
    first = [path for path in files if "rank-00000" in path]
    second = [path for path in files if "rank-00001" in path]
    chosen = choose([found(twenty, "disk of m0", *second), found(twenty, "disk of m1", *first)])
    assert chosen is not None
    assert dict(chosen.sources)[SHARD] == "disk of m1"
    with pytest.raises(NothingToRestore, match="nowhere whole"):
        choose([found(twenty, "disk of m0", *second)])


def test_broken_everywhere_is_passed_over(manifests: Mapping[str, Manifest]) -> None:
    """The checkpoint before is taken, and the reason is told once."""
    ten, twenty = at(manifests, 10), at(manifests, 20)
    chosen = choose([found(twenty, "disk", SHARD), found(twenty, "durable", SHARD), found(ten)])
    assert chosen is not None and chosen.manifest.step == 10
    assert len(chosen.passed_over) == 1
    assert SHARD in chosen.passed_over[0].reason


def test_suspects_only_if_asked_and_last(manifests: Mapping[str, Manifest]) -> None:
    """C137: a checkpoint of a NaN run is never the latest."""
    ten, thirty = found(at(manifests, 10)), found(at(manifests, 30))
    chosen = choose([thirty, ten])
    assert chosen is not None and chosen.manifest.step == 10
    assert "suspect" in chosen.passed_over[0].reason
    chosen = choose([thirty, ten], Asked(allows_suspect=True))
    assert chosen is not None and chosen.manifest.step == 10
    with pytest.raises(NothingToRestore, match="suspect"):
        choose([thirty])
    chosen = choose([thirty], Asked(allows_suspect=True))
    assert chosen is not None and chosen.manifest.step == 30


def test_the_run_that_got_furthest(manifests: Mapping[str, Manifest]) -> None:
    items = [found(at(manifests, step)) for step in (10, 15)]
    chosen = choose(items)
    assert chosen is not None and chosen.manifest.run_id == "another"
    chosen = choose(items, Asked(run_id="run-a"))
    assert chosen is not None and chosen.manifest.step == 10


def test_nothing_is_never_silent(manifests: Mapping[str, Manifest]) -> None:
    """C13: empty means a fresh start; a wish that can't be met, or only broken ones, an error."""
    assert choose([]) is None
    broken = Passed(name="step-x", tier="durable", reason="no manifest")
    with pytest.raises(NothingToRestore, match="no manifest"):
        choose([], rejected=[broken])
    assert choose([], Asked(allows_fresh_start=True), [broken]) is None
    with pytest.raises(NothingToRestore):
        choose([], Asked(is_required=True))
    with pytest.raises(NothingToRestore, match="step 11"):
        choose([found(at(manifests, 10))], Asked(step=11))
    with pytest.raises(NothingToRestore, match="nothing else is taken"):
        choose([found(at(manifests, 10))], Asked(name="typo", allows_fresh_start=True))


def test_order_of_arrival_does_not_matter(manifests: Mapping[str, Manifest]) -> None:
    items = [found(manifest) for manifest in manifests.values()]
    names = set()
    for seed in range(20):
        random.Random(seed).shuffle(items)
        chosen = choose(items, Asked(run_id="run-a"))
        assert chosen is not None
        names.add(chosen.name)
    assert len(names) == 1


def test_world_size_changes_do_not_split_the_group(tmp_path: Path) -> None:
    """C20: saved with 4, then with 2, resumed with 4: all ranks agree on the newest."""
    store = local(tmp_path)
    save(store, 10, world_size=4)
    save(store, 20, world_size=2, generation=2)
    chosen = pick({"durable": store})
    assert chosen is not None
    assert (chosen.manifest.step, chosen.manifest.world_size) == (20, 2)


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def test_pick_reads_before_it_decides(tmp_path: Path) -> None:
    """A flipped bit that sizes don't show: the copy of another tier, or the one before."""
    disk, durable = local(tmp_path / "disk"), local(tmp_path / "durable")
    for store in (disk, durable):
        save(store, 10)
        twenty = save(store, 20)
    stores = {"disk": disk, "durable": durable}
    flip(tmp_path / "disk" / twenty.name / SHARD, -1)
    chosen = pick(stores)
    assert chosen is not None and chosen.manifest.step == 20
    assert dict(chosen.sources)[SHARD] == "durable"
    checkpoint = next(open_named(stores, chosen.name))
    _, image = make(1, 2, 20)
    buffer = bytearray(b"\xee" * len(image))
    checkpoint.read_image(1, memoryview(buffer))
    assert buffer == image
    assert checkpoint.served[SHARD] == durable.location

    flip(tmp_path / "durable" / twenty.name / SHARD, -1)
    with pytest.raises(ShardCorrupt, match="no tier has a good copy"):
        open_checkpoint(disk, twenty.name, others=[durable]).read_image(1, memoryview(buffer))
    chosen = pick(stores)
    assert chosen is not None and chosen.manifest.step == 10
    assert "differs from its checksum" in chosen.passed_over[-1].reason


def test_a_lost_tier_is_no_reason_to_stop(tmp_path: Path) -> None:
    good = local(tmp_path / "durable")
    save(good, 10)
    (tmp_path / "disk").write_text("a file where a directory should be")
    chosen = pick({"disk": local(tmp_path / "disk"), "durable": good})
    assert chosen is not None and chosen.tiers() == ("durable",)
