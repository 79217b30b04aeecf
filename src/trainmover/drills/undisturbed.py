"""The yardstick: the same job really run, in a process tree of its own, with nothing done to it.

Decides what "the same job" is: script, arguments, world size and settings, without standby and
without faults. Results are kept for the life of this process only, never on disk: a stored result
could be that of other code.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from trainmover.drills.harness import RunningJob
from trainmover.drills.request import JobRequest, JobResult
from trainmover.errors import DrillFailed

_known: dict[JobRequest, JobResult] = {}


def undisturbed_request(request: JobRequest) -> JobRequest:
    """The same job left alone."""
    return replace(request, standbys=0, faults="", disturbance=(), flags=())


def run_undisturbed(request: JobRequest, folder: Path) -> JobResult:
    """Run the job left alone, or return what it gave before in this process.

    Raises:
        DrillFailed: It did not complete: then there is nothing to compare with.
    """
    key = undisturbed_request(request)
    if key not in _known:
        with RunningJob(key, folder) as job:
            result = job.wait_until_done()
            if result.code != 0:
                raise DrillFailed(f"the undisturbed run ended with {result.code}; {job.tail()}")
            job.assert_no_leftovers()
        _known[key] = result
    return _known[key]
