"""Facts of a machine: features that change sums are found in the kernel's text; no torch import."""

from __future__ import annotations

import sys

import pytest

from trainmover.edges import probes
from trainmover.errors import ConfigError

CPUINFO = "processor : 0\nmodel name : X\nflags : fpu avx avx2 sse fma avx512f other\n"


def test_features_that_change_numbers_are_picked() -> None:
    assert probes.cpu_flags(CPUINFO) == ("avx", "avx2", "fma", "avx512f")


def test_arm_names_them_otherwise() -> None:
    assert probes.cpu_flags("Features : fp asimd sve\n") == ("asimd", "sve")


def test_facts_name_versions_without_importing_torch() -> None:
    loaded = "torch" in sys.modules
    facts = dict(probes.machine_facts(threads=3).must_equal)
    assert facts["threads"] == "3"
    assert facts["python"].startswith("3.")
    assert facts["torch"] != ""
    assert ("torch" in sys.modules) == loaded


def test_this_process_is_running() -> None:
    import os

    assert probes.process_state(os.getpid()) == "R"
    assert probes.start_time(os.getpid()) > 0
    assert probes.process_state(2**22 + 1) == ""


def test_an_address_of_another_machine_is_refused_and_the_own_ones_are_named() -> None:
    assert probes.own_address("127.0.0.1") == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1.*--host.*127\.0\.0\.1 \(lo\)"):
        probes.own_address("192.0.2.1")
