"""Grace times and topology files as the command line reads them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from trainmover.cli.grace import SLURM_END, VARIABLE, end_of_allocation_s, grace_text, read_labels
from trainmover.daemons.grace import Grace, NoticeFile
from trainmover.errors import ConfigError


def test_the_option_counts_more_than_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert grace_text("") == ""
    monkeypatch.setenv(VARIABLE, "30")
    assert grace_text("") == "30.0"
    assert grace_text("90") == "90.0"


@pytest.mark.parametrize("text", ["soon", "-1", "0", "inf", "nan"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--grace: expected seconds above 0"):
        grace_text(text)


def test_the_allocations_end_bounds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SLURM_END, "not said")
    assert end_of_allocation_s() == 0.0
    monkeypatch.setenv(SLURM_END, str(int(time.time()) + 1000))
    ends_s = end_of_allocation_s()
    assert 900 < Grace(ends_at_wall_s=ends_s).left_s() <= 1000
    assert Grace(usual_s=60.0, ends_at_wall_s=ends_s).left_s() == 60.0
    assert Grace(usual_s=60.0, ends_at_wall_s=1.0).left_s() == 60.0, "long over: of another job"
    assert Grace().left_s() == 0.0


def test_a_notice_file_is_read_once(tmp_path: Path) -> None:
    file = NoticeFile(str(tmp_path / "notice-{machine}"), "m3")
    assert file.read() is None
    (tmp_path / "notice-m3").write_text("45\n")
    assert file.read() == 45.0
    assert file.read() is None
    other = NoticeFile(str(tmp_path / "notice-{machine}"), "m4")
    (tmp_path / "notice-m4").write_text("TERMINATE_ON_HOST_MAINTENANCE")
    assert other.read() == 0.0
    assert NoticeFile("", "m3").read() is None


def test_a_topology_becomes_labels_and_mistakes_are_named(tmp_path: Path) -> None:
    path = tmp_path / "topology"
    path.write_text("# two racks\nm0 rack=r0 power=p\nm1 rack=r1 power=p\n")
    assert read_labels(path) == (
        ("m0", (("rack", "r0"), ("power", "p"))),
        ("m1", (("rack", "r1"), ("power", "p"))),
    )
    path.write_text("m0 row=3\n")
    with pytest.raises(ConfigError, match="line 1"):
        read_labels(path)
    with pytest.raises(ConfigError, match="can't be read"):
        read_labels(tmp_path / "absent")
