"""Is what was restored what was saved? The check behind the digests.

Decides what is compared once a rank stands at restored state: the result of the script's fixed
validation batch with the result of the same state when it was saved, bit for bit, and the first
loss with the last one on record. Tensors have been compared by digest before; losses of steps that
are done again are compared where they are written down (`daemons/repeated_losses`).

Called on: the main thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from trainmover.errors import RestoreMismatch, ScriptError
from trainmover.protocol.messages import Differing, RestoreChecked
from trainmover.state.rng import preserved_rng
from trainmover.state.tensors import tensor_digest, tensor_version
from trainmover.worker.metrics import as_float

if TYPE_CHECKING:
    from trainmover.worker.stepper import Stepper

PREFIX: Final = "validation."
"""Of the names under which results lie beside logged values."""
JUMP: Final = 2.0
"""A first loss this many times the last one on record is worth a word."""
SUSPECTS: Final = (
    "every tensor has the digest it was saved with; suspects, in this order: random generators, "
    "state that is not tracked, the order of shards"
)

Validation = Callable[[], Any]
Values = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class _Restored:
    source: str
    step: int
    recorded: Mapping[str, str]
    is_exact: bool
    has_asked: bool = False


class RestoreCheck:
    """One rank's check; does nothing in a run that has not been restored."""

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        self._validation: Validation | None = None
        self._pending: _Restored | None = None
        self._differing: tuple[Differing, ...] = ()
        self._compared = 0

    def register(self, validation: Validation) -> None:
        """What `job.validation` was given. Raises ScriptError on a second one."""
        if self._validation is not None:
            raise ScriptError("job.validation was used twice; one function returns all results")
        self._validation = validation

    # ------------------------------------------------------------------ when state is saved

    def values(self) -> Values:
        """Results of the validation for the state of now; nothing if a loss cut it short.

        Collective: if the function is, among all ranks at one boundary.
        """
        stepper = self._stepper
        if self._validation is None or stepper.is_shadow:
            return ()
        results = self._run(self._validation)
        return () if stepper.host.is_tainted else results

    def _run(self, validation: Validation) -> Values:
        stepper = self._stepper
        before = self._touched()
        with preserved_rng(), _evaluating(stepper.inventory.models), torch.no_grad():
            result = validation()
        if self._touched() != before:
            raise ScriptError(
                "the function given to job.validation has changed tracked state; it may only "
                "compute (models are in eval mode and gradients off while it runs)"
            )
        return tuple(sorted(_texts(result)))

    def _touched(self) -> tuple[int, tuple[int, ...]]:
        inventory = self._stepper.inventory
        versions = sum(tensor_version(tensor) for tensor in inventory.unnamed())
        return versions, tuple(inventory.small_digest(name) for name in inventory.small_names)

    # ------------------------------------------------------------------ after a restore

    def begin(self, source: str, recorded: Values, *, is_exact: bool) -> None:
        """This rank has loaded `source`; all ranks have loaded theirs.

        Args:
            source: For people: `checkpoint NAME`, `snapshot of step N`.
            recorded: What lies beside that state: logged values, results of the validation.
            is_exact: Whether the numbers must be those of the run that saved it.
        """
        step = self._stepper.version.step
        self._pending = _Restored(source, step, dict(recorded), is_exact)
        self._differing, self._compared = (), 0

    def drop(self) -> None:
        """Somebody joins who has not been restored with us: he would not take part."""
        self._pending = None

    def at_attempt(self) -> None:
        """An attempt begins: validate the restored state, again if a loss undid the last attempt.

        Raises:
            RestoreMismatch: Results differ, and the job is to stop then.
        """
        pending, validation = self._pending, self._validation
        if pending is None or validation is None or pending.step != self._stepper.version.step:
            return
        found = dict(self._run(validation))
        if self._stepper.host.is_tainted:
            return
        names = [name for name in pending.recorded if name.startswith(PREFIX)]
        self._compared = len(names)
        self._differing = tuple(
            Differing(name=name, recorded=pending.recorded[name], found=found.get(name, "nothing"))
            for name in names
            if found.get(name) != pending.recorded[name]
        )
        if self._differing and pending.is_exact:
            self._complain(pending)

    def _complain(self, pending: _Restored) -> None:
        first = self._differing[0]
        text = (
            f"after loading {pending.source}, {first.name} is {first.found} on rank "
            f"{self._stepper.rank} and was {first.recorded} when it was saved: {SUSPECTS}"
        )
        self._tell(pending, text)
        if self._stepper.host.config.stops_on_mismatch:
            raise RestoreMismatch(text)
        self._stepper.logbook.finding("restore-check", text)

    def committed(self, logged: Mapping[str, str]) -> None:
        """The first step behind a restore is committed: say how it went, once."""
        pending, self._pending = self._pending, None
        if pending is None or self._stepper.is_shadow:
            return
        if self._stepper.rank == 0 and not (self._differing and pending.is_exact):
            self._tell(pending, self._summary(pending, logged))

    def _summary(self, pending: _Restored, logged: Mapping[str, str]) -> str:
        parts = ["tensors by digest"]
        if self._compared and pending.is_exact:
            parts.append(f"{self._compared} validation results bit for bit")
        elif self._compared:
            equal = self._compared - len(self._differing)
            parts.append(f"{equal} of {self._compared} validation results bit for bit")
            parts += [f"{d.name} {d.recorded} there, {d.found} here" for d in self._differing]
        last, first = _loss(pending.recorded), _loss(logged)
        if last is not None and first is not None:
            parts.append(f"last recorded loss {last:g}, first loss {first:g}")
            if not math.isfinite(first) or abs(first) > JUMP * abs(last):
                parts.append(f"a jump: {SUSPECTS}")
        if not pending.is_exact:
            parts.append("the numbers need not be those of the run that saved it")
        return f"{pending.source} is what was saved: {'; '.join(parts)}"

    def _tell(self, pending: _Restored, text: str) -> None:
        stepper = self._stepper
        stepper.host.tell(
            RestoreChecked(
                incarnation=stepper.host.incarnation,
                rank=stepper.rank,
                generation=stepper.host.generation,
                step=pending.step,
                source=pending.source,
                compared=self._compared,
                differing=self._differing if pending.is_exact else (),
                text=text,
            )
        )


@contextmanager
def _evaluating(models: list[torch.nn.Module]) -> Iterator[None]:
    """All modules in eval mode, and no trace in the next step.

    DDP neither sends buffers nor forgets that it has to. FSDP2 keeps its root gathered after a
    forward without backward, and what to gather ahead in the next backward: a joiner, which has
    not validated, would issue other collectives.
    """
    modules = [module for model in models for module in model.modules()]
    modes = [module.training for module in modules]
    wrapped = [module for module in modules if isinstance(module, DistributedDataParallel)]
    syncs = [module.require_forward_param_sync for module in wrapped]
    for module in modules:
        module.training = False
    for module in wrapped:
        module.require_forward_param_sync = False
    try:
        yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
        for module, does_sync in zip(wrapped, syncs, strict=True):
            module.require_forward_param_sync = does_sync
        for module in modules:
            if isinstance(module, FSDPModule) and module._get_fsdp_state()._is_root:
                module.reset_iter_state()


def _texts(result: Any) -> Iterator[tuple[str, str]]:
    named = result if isinstance(result, Mapping) else {"result": result}
    for name, value in named.items():
        yield f"{PREFIX}{name}", _text(value)


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        return f"{tensor_digest(value):016x} of {list(value.shape)}"
    plain = value.item() if isinstance(value, torch.Tensor) else value
    return plain.hex() if isinstance(plain, float) else str(plain)


def _loss(values: Mapping[str, str]) -> float | None:
    return as_float(values.get("loss", ""))
