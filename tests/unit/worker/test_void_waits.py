"""What the main thread waits for ends once nobody wants it: loads, recordings, walks, adoptions."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.worker_lifecycle.stories import ME, NAMES, a_plan
from tests.waiting import eventually

from trainmover.checkpoint.bounded import Watch
from trainmover.communicator.engine import Engine
from trainmover.edges.errand import Errand
from trainmover.errors import TransportError
from trainmover.protocol.messages import DiskPart, JobSpec, Rehearsal, Version
from trainmover.rehearsal.config import RehearsalConfig
from trainmover.state.inventory import Inventory
from trainmover.topology import Member
from trainmover.worker import orders
from trainmover.worker.exchange import Exchange
from trainmover.worker.link import AgentLink
from trainmover.worker.restoring import Loading, restore
from trainmover.worker.roles import Roles
from trainmover.worker.snapshot_side import SnapshotSide
from trainmover.worker.unwinding import Halted
from trainmover.worker.walk import Walk

pytestmark = pytest.mark.timeout(60)
SHORT_S = 10.0
"""Far below the limits of what is waited for."""


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """A peer that is stopped: the kernel accepts for it, nobody answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(SHORT_S)
        yield listener


def port_of(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def begun(work: Callable[[], object]) -> tuple[threading.Thread, list[str]]:
    """`work` on a thread of its own, and what it raised."""
    raised: list[str] = []

    def run() -> None:
        try:
            work()
        except TransportError as error:
            raised.append(str(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, raised


# ------------------------------------------------------------------------- a checkpoint's load


class Loader:
    """What a load asks of a stepper and its host."""

    def __init__(self, folder: Path) -> None:
        spec = JobSpec(
            job="job",
            run_id="run",
            script="x.py",
            world_size=2,
            workers_per_machine=1,
            settings=(
                ("checkpoint.directory", str(folder / "shared")),
                ("checkpoint.local_directory", str(folder / "own")),
            ),
        )
        self.snapshots = SnapshotSide("m0", spec, b"s" * 32, 60.0)
        self.under_way: list[Loading | None] = []
        self.stepper: Any = SimpleNamespace(
            host=self, inventory=Inventory({}), version=Version(step=0)
        )
        self.stepper.roles = Roles(self.stepper)

    def loads(self, loading: Loading | None) -> None:
        self.under_way.append(loading)


def test_a_load_ends_with_the_generation_that_it_is_for(
    silent: socket.socket, tmp_path: Path
) -> None:
    """Another member is lost meanwhile: the next plan must not wait for a disk, or for storage."""
    host = Loader(tmp_path)
    part = DiskPart(machine="m1", folder="m1", ranks=(0,), host="127.0.0.1", port=port_of(silent))
    begin = orders.Restore("step-00000008-abc", Version(step=8, lineage=1), (part,))
    main, _ = begun(lambda: restore(host.stepper, begin))
    with silent.accept()[0]:
        (loading,) = host.under_way
        assert loading is not None
        loading.end()
        main.join(SHORT_S)
        assert not main.is_alive()
    assert host.stepper.version == begin.target, "the boundary it comes to, which is void"
    assert host.under_way[-1] is None
    watch = host.stepper.roles.void_load
    assert watch is loading.watch
    eventually(lambda: watch.has_ended, "the reading thread has noticed", timeout_s=SHORT_S)


def test_state_that_hung_storage_may_still_write_to_is_not_rolled_back_into() -> None:
    stepper: Any = SimpleNamespace(host=SimpleNamespace(snapshots=object()))
    roles = Roles(stepper)
    roles.void_load = Watch()
    with pytest.raises(Halted, match="may still write"):
        roles._roll_back(a_plan(3, NAMES))


# ------------------------------------------------------------------------- a standby's rehearsal


def runtime_of(tmp_path: Path) -> Any:
    def dial(keeper: Any, purpose: str, generation: int, errand: Errand) -> socket.socket:
        return errand.connect(keeper.host, keeper.port)

    return SimpleNamespace(
        orders=orders.OrderBox(lambda: True),
        config=SimpleNamespace(transfer_timeout_s=600.0),
        communicator=SimpleNamespace(dial=dial),
        rehearsal=RehearsalConfig(nice=0, store=str(tmp_path), writes="allow"),
        request=SimpleNamespace(
            machine="m9", spec=SimpleNamespace(log_directory=str(tmp_path), settings=())
        ),
        incarnation="m9.0.a",
        tell_finding=lambda kind, text: None,
    )


def a_rehearsal(digest: str, port: int = 1) -> Rehearsal:
    return Rehearsal(
        role_class=digest,
        as_rank=0,
        ranks=(0,),
        fingerprint="f",
        file="elsewhere",
        bytes=1,
        keeper=Member(rank=0, incarnation="m0.0.a", machine="m0", host="127.0.0.1", port=port),
    )


def test_a_recording_is_not_fetched_while_somebody_waits_for_the_standby(
    silent: socket.socket, tmp_path: Path
) -> None:
    runtime = runtime_of(tmp_path)
    exchange = Exchange(runtime)
    runtime.orders.on_given = exchange.ordered
    rehearsal = a_rehearsal("c1", port_of(silent))
    main, raised = begun(lambda: exchange.fetch_recording(rehearsal))
    with silent.accept()[0]:
        runtime.orders.give(orders.Settle(a_plan(2, NAMES)))
        main.join(SHORT_S)
        assert not main.is_alive()
    assert raised
    with pytest.raises(TransportError, match="called off"):  # and none is begun
        exchange.fetch_recording(rehearsal)


def test_a_walk_ends_where_a_plan_waits_for_the_standby(tmp_path: Path) -> None:
    for is_waited_for in (False, True):
        runtime = runtime_of(tmp_path)
        walk = Walk(runtime)
        rehearsals = (a_rehearsal("c1"), a_rehearsal("c2"))
        walk._order = orders.RunMain(0, 2, True, -1, rehearsals=rehearsals)
        if is_waited_for:
            runtime.orders.give(orders.Settle(a_plan(2, NAMES)))
        following = walk.finish()
        assert walk.classes == ["c1"]
        assert (following is None) == is_waited_for


# ------------------------------------------------------------------------- a plan that is aborted


def test_main_is_not_entered_again_for_a_plan_that_is_void() -> None:
    told: list[Any] = []
    host = SimpleNamespace(
        incarnation=ME, is_void=lambda plan: plan.number == 2, adopted=lambda *a: told.append(a)
    )
    stepper: Any = SimpleNamespace(host=host)
    Roles(stepper).adopt(a_plan(2, NAMES, joiners=[ME]))
    assert told == []

    runtime: Any = SimpleNamespace()
    exchange = Exchange(runtime)
    exchange.abort(2)
    assert exchange.is_void(a_plan(2, NAMES))
    assert not exchange.is_void(a_plan(3, NAMES))


# ------------------------------------------------------------------------- an agent that is stopped


def test_a_stopped_agent_does_not_hold_up_the_thread_of_all_channels(tmp_path: Path) -> None:
    """Nobody is let in any more, and each try is made on the I/O thread."""
    path = str(tmp_path / "agent")
    engine = Engine()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(0)
        waiting = _filled(path)
        link = AgentLink(engine, path, "m0.0.a")
        engine.start()
        try:
            engine.submit(link.connect)
            for _ in range(20):
                turn = threading.Event()
                engine.call_later(0.01, turn.set)
                assert turn.wait(SHORT_S), "the I/O thread waits for the agent"
        finally:
            engine.submit(link.close)
            engine.stop(5.0)
            for one in waiting:
                one.close()


def _filled(path: str) -> list[socket.socket]:
    waiting = []
    while True:
        one = socket.socket(socket.AF_UNIX)
        one.setblocking(False)
        waiting.append(one)
        try:
            one.connect(path)
        except BlockingIOError:
            return waiting
