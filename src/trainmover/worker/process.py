"""A worker process from fork to end: runtime, script, exit code."""

from __future__ import annotations

import gc
import os
import runpy
import sys
import sysconfig

import torch

from trainmover.communicator.group import Group, init_process_group, register_backend
from trainmover.errors import IncompatibleMachine, LocalProtocolError, ScriptError
from trainmover.protocol import exits
from trainmover.protocol.nursery import ForkRequest
from trainmover.worker import orders
from trainmover.worker.distributed_entry import DistributedEntry
from trainmover.worker.entry import INCARNATION_VARIABLE, Driver, ProcessEnds, set_driver
from trainmover.worker.mistakes import explained
from trainmover.worker.rank_reads import INSTALLED
from trainmover.worker.runtime import Runtime
from trainmover.worker.self_check import WriteWatch
from trainmover.worker.torch_check import check_torch
from trainmover.worker.unwinding import ScriptAgain

LIBRARIES = ("torch", "trainmover")
RERUN = (
    "{place} reads the rank in front of main: the whole script runs again in a standby that takes "
    "another rank. Read it inside of main, and only main is entered again"
)


def run_worker(request: ForkRequest) -> int:
    """Play this process's part; returns its exit code.

    Called on: the main thread of a freshly forked process. Blocks: until the part is over.
    """
    os.environ[INCARNATION_VARIABLE] = request.incarnation
    runtime = Runtime(request)
    torch.set_num_threads(runtime.config.threads)
    try:
        note = check_torch(Group)
    except IncompatibleMachine as error:
        print(f"trainmover: {error}", flush=True)
        return exits.INCOMPATIBLE
    register_backend(runtime.communicator)
    runtime.link.tally.read_counters = lambda: runtime.communicator.counters
    distributed = DistributedEntry(
        runtime.tell_finding, lambda: runtime.reads.note_place("a sub-group")
    )
    distributed.install()
    driver = Driver(runtime, distributed)
    set_driver(driver)
    runtime.start_groups = lambda order: init_process_group(
        runtime.communicator, order.rank, order.world_size
    )
    if runtime.config.is_check and runtime.rehearsal.writes == "allow":
        WriteWatch(runtime.tell_finding, runtime.is_shadow).install()
    runtime.start()
    if note:
        runtime.tell_finding("torch", note)
    code = _play(request, runtime, driver)
    runtime.finish_process(code)
    return code


def _play(request: ForkRequest, runtime: Runtime, driver: Driver) -> int:
    order = runtime.orders.take()
    while not isinstance(order, orders.RunMain):
        match order:
            case orders.Halt():
                return order.code
            case orders.Leave() | orders.Finish():
                return exits.COMPLETED
            case orders.Settle():
                runtime.host.settled(order.plan)
            case _:
                raise LocalProtocolError(f"{type(order).__name__} before main was entered")
        order = runtime.orders.take()
    spec = request.spec
    sys.path.insert(0, os.path.dirname(os.path.abspath(spec.script)))
    known = frozenset(sys.modules)
    try:
        while True:
            driver.first = order
            try:
                return _run_script(request, runtime, driver)
            except ScriptAgain as again:
                order = again.order
            reads = runtime.reads.in_script
            runtime.tell_finding("rank", RERUN.format(place=reads[0]))
            if any(place.rpartition(":")[0] != spec.script for place in reads):
                forget_modules(known)
            gc.collect()
    except ProcessEnds as end:
        return end.code


def _run_script(request: ForkRequest, runtime: Runtime, driver: Driver) -> int:
    """The script from its first line, as the rank of `driver.first`. Raises ScriptAgain."""
    spec, order = request.spec, driver.first
    runtime.show_rank(order)
    sys.argv = [spec.script, *spec.arguments]
    if order.is_loopback:
        runtime.host.walk.guard()
    runtime.reads.begin_script()
    try:
        runpy.run_path(spec.script, run_name="__main__")
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        driver.failed(explained(error))
    else:
        driver.failed(
            ScriptError(
                f"{spec.script} ended without calling trainmover.run(main); end it with\n"
                'if __name__ == "__main__":\n    trainmover.run(main)'
            )
        )
    return exits.SCRIPT_FAILED


def forget_modules(known: frozenset[str]) -> None:
    """Imports of the script's own modules start anew, but for `known` and installed ones."""
    stdlib = sysconfig.get_path("stdlib")
    for name in set(sys.modules) - known:
        path = getattr(sys.modules[name], "__file__", None) or ""
        is_installed = any(part in path for part in INSTALLED) or path.startswith(stdlib)
        if path and not is_installed and name.partition(".")[0] not in LIBRARIES:
            del sys.modules[name]
