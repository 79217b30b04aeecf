"""Bad input in one table: what is typed, and the words of the one line that answers it."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainmover.cli.app import main
from trainmover.daemons.run_directory import BASE_VARIABLE
from trainmover.protocol import exits

SCRIPT = __file__
TABLE: tuple[tuple[str, str], ...] = (
    ("run", "Missing argument 'script'"),
    ("run --stanby 1 train.py", "no such option: --stanby"),
    ("run nothing.py", "no script at nothing.py"),
    ("run .", "no script at ."),
    (f"run --machines 0 {SCRIPT}", "--machines: expected at least 1, got 0"),
    (f"run --machines two {SCRIPT}", "--machines"),
    (f"run --standby -1 {SCRIPT}", "--standby: expected at least 0, got -1"),
    (f"run --nproc-per-node 0 {SCRIPT}", "--nproc-per-node: expected at least 1, got 0"),
    (f"run --max-restarts -2 {SCRIPT}", "--max-restarts: expected at least 0, got -2"),
    (f"run --nnodes 2 {SCRIPT}", "--nnodes 2 needs --rdzv-endpoint HOST:PORT"),
    (f"run --rdzv-endpoint host:port {SCRIPT}", "expected HOST:PORT, got 'host:port'"),
    (f"run --config nothing.toml {SCRIPT}", "nothing.toml can't be read"),
    (f"run --set nonsense {SCRIPT}", "expected --set owner.field=value, got 'nonsense'"),
    (f"run --set worker.treads=2 {SCRIPT}", "did you mean 'worker.threads'"),
    (f"run --set worker.threads=many {SCRIPT}", "worker.threads: expected int, got 'many'"),
    (f"run --set worker.gate_timeout_s=-1 {SCRIPT}", "worker.gate_timeout_s must be above 0"),
    (
        f"run --set agent.heartbeat_interval_s=100 {SCRIPT}",
        "must be above three times agent.heartbeat_interval_s",
    ),
    ("status", "no job is running"),
    ("status --job none", "no job 'none'"),
    ("status --run-dir .", "controller.json is missing"),
    ("status --controller host", "expected HOST:PORT, got 'host'"),
    ("status --controller 127.0.0.1:1", "the job's token is needed"),
    ("switchover", "Missing argument 'machines'"),
    ("switchover m1", "no job is running"),
    ("switchover m1 --to m1", "to itself: m1"),
    ("incidents", "no job is running"),
    ("stop", "no job is running"),
    ("stop --mode now", "No such option: --mode"),
    ("logs --rank first", "--rank"),
    ("check", "Missing argument 'script'"),
    ("check nothing.py", "no script at nothing.py"),
    ("agent", "Missing option '--controller'"),
    ("agent --controller nowhere", "expected HOST:PORT, got 'nowhere'"),
    ("drill nonsense", "no drill 'nonsense'"),
    ("bench nonsense", "no benchmark 'nonsense'"),
    ("bench verify", "name the file"),
    ("bench verify nothing.json", "nothing.json is no benchmark file"),
    ("simulate --seeds 0", "--seeds: expected at least 1, got 0"),
    ("simulate --seeds many", "--seeds"),
    ("config nothing.toml", "nothing.toml can't be read"),
    ("demo extra", "unexpected extra argument"),
    ("nonsense", "unknown command 'nonsense'"),
)


@pytest.mark.parametrize(("typed", "words"), TABLE, ids=[typed[:60] for typed, _ in TABLE])
def test_bad_input_gets_one_clear_line(
    typed: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(BASE_VARIABLE, str(tmp_path / "jobs"))
    monkeypatch.delenv("TRAINMOVER_TOKEN", raising=False)
    monkeypatch.chdir(tmp_path)
    code = main(typed.split(" "))
    shown = capsys.readouterr()
    assert code == exits.BAD_USAGE, shown
    assert words in shown.err
    assert "Traceback" not in shown.err
    assert not list(tmp_path.iterdir()), "nothing may have been started"
