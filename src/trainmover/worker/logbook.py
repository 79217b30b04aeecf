"""What `step.log` records, and when it is told.

Values recorded in front of the gate ride with the rank's personal state: they are told even if the
primary is lost right behind the gate. Values recorded behind it are told with the commit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainmover.protocol.messages import Finding, StepLogged

if TYPE_CHECKING:
    from trainmover.worker.stepper import Stepper


class Logbook:
    """Values of the current step, and findings."""

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        self.before_gate: dict[str, str] = {}
        self.after_gate: dict[str, str] = {}
        self._earlier: dict[str, str] = {}

    def begin(self) -> None:
        """An attempt starts."""
        self._earlier = self.before_gate
        self.before_gate = {}
        self.after_gate = {}

    def undo(self) -> None:
        """What rides with the boundary is again what the step before it has recorded."""
        self.before_gate = self._earlier
        self.after_gate = {}

    def log(self, values: Mapping[str, Any]) -> None:
        """Record values of the current step; told once when it is committed."""
        target = self.before_gate if self._stepper.phase == "running" else self.after_gate
        texts = {name: _as_text(value) for name, value in values.items()}
        target.update(texts)
        self._stepper.snapshots.logged(texts)

    def commit(self, step_index: int) -> None:
        """Called by the step when it is committed and its block has ended."""
        if self._stepper.is_shadow or self._stepper.rank != 0:
            return
        values = dict(self.before_gate)
        if self._stepper.tail.digest is None:
            values.update(self.after_gate)
        if self._stepper.host.config.does_log_digests:
            values["state"] = f"{self._stepper.tail.whole_digest():016x}"
        if values:
            self.tell(step_index, values)

    def tell(self, step_index: int, values: Mapping[str, str], *, is_again: bool = False) -> None:
        """Tell values of one committed step; `is_again`: the lost primary may have done so."""
        self._stepper.host.tell(
            StepLogged(
                incarnation=self._stepper.host.incarnation,
                step=step_index,
                lineage=self._stepper.version.lineage,
                values=tuple(sorted(values.items())),
                is_again=is_again,
            )
        )

    def tell_reduced(self, by_step: Mapping[int, Mapping[str, str]]) -> None:
        """Reduced values of earlier steps, by the primary."""
        if self._stepper.is_shadow or self._stepper.rank != 0:
            return
        for step_index, values in sorted(by_step.items()):
            self._stepper.snapshots.logged(values)
            self.tell(step_index, values)

    def finding(self, kind: str, text: str) -> None:
        """Tell the user something, once per kind and text (the supervisor removes repeats)."""
        self._stepper.host.tell(
            Finding(
                incarnation=self._stepper.host.incarnation,
                rank=self._stepper.rank,
                kind=kind,
                text=text,
            )
        )


def _as_text(value: Any) -> str:
    item = getattr(value, "item", None)
    plain = item() if callable(item) else value
    if isinstance(plain, bool) or not isinstance(plain, float):
        return str(plain)
    return plain.hex()
