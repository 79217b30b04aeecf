"""One step as the user sees it: `with step:` or `step.run(fn)`."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from trainmover.errors import ScriptError
from trainmover.worker import mistakes
from trainmover.worker.unwinding import StepUndone

if TYPE_CHECKING:
    from trainmover.worker.metrics import Metrics
    from trainmover.worker.stepper import Stepper

T = TypeVar("T")


class Step:
    """One optimizer step. Given by `job.steps`; use it as a context manager or call `run`.

    Attributes:
        index: Number of the step, from 0.
        committed: True once its gate has passed on all ranks. Python goes on behind a `with`
            block whose step was undone and will be repeated: put nothing there that must happen
            once, or use `after`.
    """

    def __init__(self, stepper: Stepper, metrics: Metrics, index: int) -> None:
        self._stepper = stepper
        self._metrics = metrics
        self.index = index
        self.committed = False
        self.was_entered = False
        self.was_undone = False
        self._after: list[Callable[[], object]] = []
        self._parts_behind = list(stepper.parts_done)
        self._parts_run: list[str] = list(stepper.parts_done)

    @property
    def parts(self) -> list[str]:
        """Names of the parts run so far (callable form)."""
        return self._parts_run

    # ------------------------------------------------------------------ block form

    def __enter__(self) -> Step:
        if self.was_entered:
            raise ScriptError(f"step {self.index} was entered twice; take one step per iteration")
        self.was_entered = True
        self._stepper.entered = self._stepper.version.step
        self._stepper.tail.is_in_step = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        stepper = self._stepper
        stepper.tail.is_in_step = False
        if error is None and stepper.phase == "running":
            error = self._gate_at_exit()
        if error is None and stepper.tail.is_void:
            error = StepUndone()
        if isinstance(error, StepUndone):
            self._undone()
            return True
        if error is not None:
            if self._is_caused_by_run_out(error):
                if not _is_clean(error):
                    _run_out_failed(stepper, error)
                _tell_swallowed(stepper, error)
                self._undone()
                return True
            return False
        self._commit()
        return False

    def _gate_at_exit(self) -> BaseException | None:
        """A step without an update still passes its gate (a scaler that skips, a last part)."""
        try:
            self._check_has_optimizer()
            self._stepper.gate(has_update=False)
        except StepUndone as undone:
            return undone
        return None

    def _check_has_optimizer(self) -> None:
        if not self._stepper.inventory.optimizers and not self._stepper.is_shadow:
            raise mistakes.no_gate(self.index, self._stepper)

    def _is_caused_by_run_out(self, error: BaseException) -> bool:
        stepper = self._stepper
        is_void = stepper.tail.is_void or (stepper.phase == "running" and stepper.host.is_tainted)
        return is_void and isinstance(error, Exception | SystemExit)

    def _undone(self) -> None:
        self._stepper.undo()
        self.was_undone = True
        self._after.clear()
        self._metrics.forget()

    def _commit(self) -> None:
        self.committed = True
        if self._stepper.is_shadow:
            return
        self._metrics.commit()
        self._stepper.restored.committed(self._stepper.logbook.before_gate)
        self._stepper.logbook.commit(self.index)
        after, self._after = self._after, []
        for fn in after:
            fn()

    # ------------------------------------------------------------------ callable form

    def run(self, first: str | Callable[..., T], *args: Any, **kwargs: Any) -> T | None:
        """Call a function as this step (or, with a name in front, as one part of it).

        Repeats inside until the gate has passed and returns that result. On a joiner, a part that
        is behind the job already is not called; its result is None there. None, too, where all
        ranks have rolled back to an earlier step meanwhile: `committed` is False then, and the
        loop goes on with that step.

        Called on: every rank. Blocks: as long as `fn` and its repetitions take.
        """
        if isinstance(first, str):
            name, fn, rest = first, args[0], args[1:]
        else:
            name, fn, rest = "", first, args
        if self.was_undone:
            return None  # a part before it was rolled back
        if name in self._parts_run and name in self._parts_behind:
            self.was_entered = True  # the parts behind may be all there are
            self._parts_behind.remove(name)
            if not self._parts_behind:
                self._stepper.resume_part()
            return None
        if not name and self.was_entered:
            raise ScriptError(
                f"step {self.index}: step.run(fn) was called twice; name the parts: "
                'step.run("generator", fn)'
            )
        self.was_entered = True
        self._stepper.entered = self._stepper.version.step
        if name and self._stepper.is_shadow:
            return self._rehearse(name, lambda: fn(*rest, **kwargs))
        result: T | None = self._repeat(name, lambda: fn(*rest, **kwargs))
        if name and not self.was_undone:
            self._parts_run.append(name)
        return result

    def _rehearse(self, name: str, call: Callable[[], T]) -> T | None:
        """A standby: as many attempts of this part as the members have made (decision 0003)."""
        stepper = self._stepper
        times = stepper.shadow.times_of_part(is_first=not self._parts_run)
        self._parts_run.append(name)
        stepper.part = name
        result: T | None = None
        for _ in range(times):
            stepper.phase = "running"
            stepper.reading.enter_part()
            result = call()
            stepper.gate(has_update=False, part=name)
            stepper.reading.leave_part()
            self._commit()
        stepper.phase = "tail"
        stepper.part = ""
        return result

    def _repeat(self, name: str, call: Callable[[], T]) -> T | None:
        stepper = self._stepper
        stepper.part = name
        stepper.reading.enter_part()
        while True:
            if stepper.phase != "running":
                stepper.boundary()
            if stepper.has_rolled_back:
                # Another step's turn: the loop has to come round, and hand out its arguments.
                self.was_undone = True
                return None
            stepper.restart_attempt()
            try:
                stepper.tail.is_in_step = True
                result = call()
                stepper.gate(has_update=False, part=name)
                if stepper.tail.is_void:
                    raise StepUndone
            except StepUndone:
                stepper.undo()
                self._after.clear()
                self._metrics.forget()
                continue
            except (Exception, SystemExit) as error:
                if not self._is_caused_by_run_out(error):
                    raise
                if not _is_clean(error):
                    _run_out_failed(stepper, error)
                _tell_swallowed(stepper, error)
                stepper.undo()
                self._after.clear()
                self._metrics.forget()
                continue
            finally:
                stepper.tail.is_in_step = False
                stepper.part = name
            stepper.reading.leave_part()
            self._commit()
            stepper.part = ""
            return result

    # ------------------------------------------------------------------ both forms

    def gate(self) -> None:
        """Enter the gate by hand: gradients are complete, the update follows (own optimizers).

        Collective: yes, once per step. Blocks: until all ranks are here.
        """
        self._stepper.gate(has_update=True, part=self._stepper.part)

    def after(self, fn: Callable[[], object]) -> None:
        """Call `fn` once, when this step is committed; dropped if the attempt is undone.

        Behind the block that is at once, or never; on a standby never.
        """
        if self._stepper.is_shadow or self.was_undone:
            return
        if self.committed and self._stepper.phase != "running":
            fn()
        else:
            self._after.append(fn)

    def log(self, *, reduce: str | None = None, **values: Any) -> None:
        """Record values of this step: told once, when it is committed, by rank 0.

        Args:
            reduce: None: rank 0's value. "mean" | "sum" | "max" | "min": over all ranks; it rides
                in front of the next gate and is told one step later.
            **values: Numbers or one-element tensors (float64 is exact; told as float.hex()).

        Called in front of `optimizer.step()` the value is held by two peers before the gate
        passes, so it is told even if rank 0 is lost right behind it.
        """
        if reduce is None:
            self._stepper.logbook.log(values)
        else:
            self._metrics.add(self.index, reduce, values)


def _is_clean(error: BaseException) -> bool:
    """Whether the script itself raised (an assertion, an exit): nothing of torch was left halfway,
    so this process can undo the attempt. Otherwise autograd, DDP or FSDP2 may be half-done."""
    trace = error.__traceback__
    while trace is not None:
        if "/torch/" in trace.tb_frame.f_code.co_filename:
            return False
        trace = trace.tb_next
    return True


def _tell_swallowed(stepper: Stepper, error: BaseException) -> None:
    stepper.logbook.finding(
        "run-out",
        f"step {stepper.step_index} raised while running out ({type(error).__name__}: {error}); "
        "it is undone and repeated",
    )


def _run_out_failed(stepper: Stepper, error: BaseException) -> NoReturn:
    """The script raised on invented values: not its fault, but this process can't go on."""
    stepper.give_up(f"raised while running out: {type(error).__name__}: {error}")
