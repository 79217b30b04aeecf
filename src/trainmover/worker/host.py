"""What the main thread needs from the process around it.

Two implementations: `runtime.Runtime` (a worker under an agent) and `plain.PlainHost` (the same
script run as `python FILE` or under torchrun, without resilience).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from trainmover.protocol.messages import Edge, Message, Plan
from trainmover.worker.config import WorkerConfig
from trainmover.worker.events import Local
from trainmover.worker.orders import OrderBox, RunMain
from trainmover.worker.personal import Personal

if TYPE_CHECKING:
    from trainmover.edges.errand import Errand
    from trainmover.state.inventory import Inventory
    from trainmover.worker.first_iterations import FirstIterations
    from trainmover.worker.increment_side import IncrementSide
    from trainmover.worker.restoring import Loading
    from trainmover.worker.snapshot_side import SnapshotSide
    from trainmover.worker.walk import Walk


class Host(Protocol):
    """The process, as the stepper sees it. Methods are called on the main thread."""

    orders: OrderBox
    config: WorkerConfig
    run_id: str
    incarnation: str
    is_managed: bool
    snapshots: SnapshotSide | None
    """None where there is no agent to keep them."""
    increments: IncrementSide | None
    """None where there are no peers to hold them."""

    @property
    def walk(self) -> Walk | None:
        """The rehearsals of a standby; None where there can be none."""

    @property
    def generation(self) -> int:
        """Generation this worker runs in; 0 before the first and on a standby."""

    @property
    def is_tainted(self) -> bool:
        """Whether a collective has returned an invented value since the last `clear_taint`."""

    @property
    def is_running_out(self) -> bool:
        """Whether collectives return at once with invented values."""

    def clear_taint(self) -> None:
        """After an undo."""

    def guard_waits(self, guard: Callable[[], None] | None) -> None:
        """Call `guard` whenever the script has waited for a collective of its own; None: no more.
        It may raise."""

    def post(self, event: Local) -> None:
        """Hand an event to the lifecycle; does not block."""

    def tell(self, message: Message) -> None:
        """Send a message that is not for the decider (log, finding)."""

    def send_personal(self, personal: Personal) -> None:
        """To both backups, in order with everything else on those channels (W2)."""

    def fetch_personal(self, plan: Plan, rank: int) -> Personal:
        """Joiner: own leaves of `rank` at the plan's target, from the holder the plan names."""

    def peek_personal(self, plan: Plan, rank: int) -> Personal | None:
        """Joiner: own leaves of `rank` as they are now, to start loader workers in time."""

    def fetch_shared(self, plan: Plan, rank: int) -> tuple[tuple[str, bytes], ...]:
        """Joiner: small leaves that all ranks have alike, from the stayer the plan names."""

    def fetch_state(self, plan: Plan, rank: int, receive: Callable[..., int]) -> int:
        """Joiner: open the bulk stream the plan names and run `receive(stream, progress)` on it."""

    def errand(self, plan: Plan) -> Errand:
        """Joiner: what `plan` has fetched ends with it. Raises TransportError: it was aborted."""

    def is_void(self, plan: Plan) -> bool:
        """Joiner: whether `plan` has been aborted since it was ordered."""

    def loads(self, loading: Loading | None) -> None:
        """Member: this load is to end with the generation; None: it has ended."""

    def adopted(self, plan: Plan, how: str) -> None:
        """Joiner: the process plays its new rank."""

    def received(self, plan: Plan, bytes_received: int) -> None:
        """Joiner: state complete and verified."""

    def failed(self, plan: Plan, edge: Edge) -> None:
        """Joiner: state can't be had from that peer."""

    def end_build(self) -> None:
        """`main` has reached its loop: later reads of the rank see it as it is."""

    def settled(self, plan: Plan) -> None:
        """Stayer or leaver: stands at the plan's target; digests are in the stepper."""

    def note(self, phase: str, step: int, collective: str = "") -> None:
        """Write the progress page."""

    def undone(self) -> None:
        """An interrupted attempt has been undone."""

    def mark(self, name: str) -> None:
        """Remember a named instant for the incident report."""

    def watch_first(self, inventory: Inventory, rank: int) -> FirstIterations | None:
        """Record the first iterations of a member; None: nobody needs them."""

    def set_rank(self, rank: int) -> None:
        """Change the rank that the process group and the environment show."""

    def note_rank_read(self) -> None:
        """The script reads the rank: remember where, while `main` builds."""

    def end_now(self, code: int) -> None:
        """End this process with `code`; does not return."""

    def enter_again(self, order: RunMain) -> None:
        """`main` can't be unwound from here: enter it again as soon as it returns."""

    def rank_readers(self) -> Sequence[str]:
        """Places (file:line) outside known objects that have read the rank in this `main`."""
