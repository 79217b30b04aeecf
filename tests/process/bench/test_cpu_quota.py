"""A process under a quota gets less of a core, by whichever means; afterwards it is as before."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest
from tests.waiting import eventually

from trainmover.drills import core_share, cpu_quota
from trainmover.drills.cpu_quota import CpuQuota

BUSY = "while True: pass"


@pytest.fixture
def busy() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", BUSY])
    yield process
    process.kill()
    process.wait(timeout=20)


def ran_s(process: subprocess.Popen[bytes]) -> float:
    found = core_share.read(process.pid)
    assert found is not None
    return found.ran_s


@pytest.mark.parametrize("has_groups", [True, False], ids=["group", "stop and go"])
def test_a_limited_process_still_runs_and_is_set_free(
    has_groups: bool, busy: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_groups:
        monkeypatch.setattr(cpu_quota, "_is_usable", lambda root: False)
    quota = CpuQuota(busy.pid, 0.2, 0.5)
    start_s = ran_s(busy)
    eventually(lambda: ran_s(busy) > start_s + 0.05, "it goes on", timeout_s=60)
    group = quota._group
    assert (group is not None) or quota.means == "stop and go"
    quota.end()
    assert psutil.Process(busy.pid).status() != psutil.STATUS_STOPPED
    assert group is None or not group.exists()


def test_the_quota_of_a_process_that_has_ended_is_lifted_too(
    busy: subprocess.Popen[bytes],
) -> None:
    quota = CpuQuota(busy.pid, 0.5, 0.2)
    busy.kill()
    busy.wait(timeout=20)
    quota.end()
