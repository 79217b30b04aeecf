"""`trainmover ckpt`: readable, --json, one line for bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.unit.checkpoint.sample import TENSORS, local, make, save, whole_bytes

from trainmover.checkpoint.writer import write_rank
from trainmover.cli.app import main
from trainmover.protocol import exits

TEN, TWENTY = "step-0000000010-l1-g1-r0ca441", "step-0000000020-l1-g1-r0ca441"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    place = tmp_path / "checkpoints"
    save(local(place), 10)
    save(local(place), 20)
    return place


def ckpt(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> str:
    assert main(["ckpt", *map(str, words)]) == code
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err
    return shown.out if code != exits.BAD_USAGE else shown.err


def as_json(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> Any:
    return json.loads(ckpt(capsys, *words, "--json", code=code))


def test_ls(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(local(root), 30, is_suspect=True)
    (root / "step-0000000040-l1-g1-r0ca441").mkdir()
    shown = ckpt(capsys, "ls", root)
    assert TEN in shown and TWENTY in shown and "SUSPECT" in shown
    assert "not a checkpoint: step-0000000040-l1-g1-r0ca441" in shown
    found = as_json(capsys, "ls", root)
    assert [item["step"] for item in found["checkpoints"]] == [10, 20, 30]
    assert found["checkpoints"][1]["loss"] == {"loss": 0.05}
    assert len(found["rejected"]) == 1


def test_show(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "model.weight" in ckpt(capsys, "show", root / TEN)
    assert as_json(capsys, "show", root)["step"] == 20, "the newest of a directory"


def test_verify(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"{TEN}: whole" in ckpt(capsys, "verify", root)
    file = root / TEN / "rank-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    shown = ckpt(capsys, "verify", root, code=1)
    assert f"{TEN}: DAMAGED" in shown and "rank-00001.safetensors" in shown
    found = as_json(capsys, "verify", root / TEN, code=1)
    assert [item["path"] for item in found[0]["damages"]] == ["rank-00001.safetensors"]
    (root / TWENTY / "MANIFEST.json").write_text("{}")
    assert f"{TWENTY}: DAMAGED" in ckpt(capsys, "verify", root, code=1)
    found = as_json(capsys, "verify", root / TWENTY, code=1)
    assert "not a manifest" in found[0]["damages"][0]["reason"]


def test_export(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert "5 tensors" in ckpt(capsys, "export", root, out, "--strip-prefix", "model.")
    data = (out / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    begin, end = header["weight"]["data_offsets"]
    weight = next(tensor for tensor in TENSORS if tensor.name == "model.weight")
    assert data[8 + length + begin : 8 + length + end] == whole_bytes(weight, 20)
    assert "exists already" in ckpt(capsys, "export", root, out, code=2)
    assert "nothing of kind" in ckpt(capsys, "export", root, tmp_path / "o", "--kind", "x", code=2)


def test_prune(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rank(local(root), *make(0, 2, 5))
    assert f"would delete {TEN}" in ckpt(capsys, "prune", root, "--keep", "last 1", "--dry-run")
    assert (root / TEN).exists()
    shown = ckpt(capsys, "prune", root, "--keep", "last 1")
    assert f"deleted {TEN}" in shown and "removed what was left of writing-step-0000000005" in shown
    assert [path.name for path in root.iterdir()] == [TWENTY]


def test_diff(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = ckpt(capsys, "diff", root / TEN, root / TWENTY, code=1)
    assert "changed: model.weight" in shown and "step: 10 -> 20" in shown
    other = tmp_path / "cut otherwise"
    save(local(other), 10, world_size=3)
    found = as_json(capsys, "diff", root / TEN, other)
    assert found["is_same_state"] and not found["changed"]
    assert ["world_size", "2", "3"] in found["facts"]


def test_restore_plan(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "same numbers" in ckpt(capsys, "restore-plan", root)
    found = as_json(capsys, "restore-plan", root, "--world-size", 3)
    assert (found["name"], found["how"], found["is_exact"]) == (TWENTY, "cut", False)
    assert [rank["personal_of"] for rank in found["ranks"]] == [0, 1, None]  # C78
    (root / TWENTY / "rank-00000.msgpack").unlink()
    shown = ckpt(capsys, "restore-plan", root)
    assert f"not {TWENTY}" in shown and f"{TEN} (step 10)" in shown


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["shwo", "."], "did you mean 'show'"),
        (["ls", "nowhere"], "nothing at 'nowhere'"),
        (["ls", "."], ""),
        (["diff", "."], "needs a second place"),
        (["ls", ".", "x"], "takes one place"),
        (["prune", "."], "--keep"),
        (["prune", ".", "--keep", "last 0"], "whole number from 1"),
        (["export", ".", "out", "--to", "pickle"], "expected safetensors"),
        (["show", "."], "there is none"),
        (["restore-plan", ".", "--step", "7"], "step 7"),
        (["ls", "nonsense://x"], "can't be opened"),
    ],
)
def test_bad_input(
    words: list[str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if not expected:
        assert "no checkpoint" in ckpt(capsys, *words)
        return
    shown = ckpt(capsys, *words, code=exits.BAD_USAGE)
    assert expected in shown and len(shown.splitlines()) == 1


def test_bad_world_size(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "at least 1" in ckpt(capsys, "restore-plan", root, "--world-size", 0, code=2)
    assert "is one" in ckpt(capsys, "prune", root / TEN, "--keep", "last 1", code=2)
    assert "step 11" in ckpt(capsys, "show", root, "--step", 11, code=2)
