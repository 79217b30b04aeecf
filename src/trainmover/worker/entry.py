"""`trainmover.run(main)`: where a script hands its main function over.

Under an agent the worker's process enters `main` as often as roles change; as `python FILE` or
under torchrun it is entered once, without resilience.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

from trainmover.errors import ScriptError
from trainmover.protocol import exits
from trainmover.protocol.messages import ScriptFailed
from trainmover.worker import mistakes, orders
from trainmover.worker.blame import machine_cause
from trainmover.worker.events import MainFailed
from trainmover.worker.job import Job
from trainmover.worker.stepper import Stepper
from trainmover.worker.unwinding import Halted, Left, Reentered, ScriptAgain

if TYPE_CHECKING:
    from trainmover.worker.distributed_entry import DistributedEntry
    from trainmover.worker.runtime import Runtime

Main = Callable[[Job], object]

INCARNATION_VARIABLE = "TRAINMOVER_INCARNATION"

_driver: Driver | None = None
_current: Job | None = None


class ProcessEnds(BaseException):
    """Unwinds the script: the worker's process ends with `code`."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def run(main: Main) -> None:
    """Run `main(job)` on this rank.

    Under `trainmover run` the process's part in the job: entered once, or again when this process
    takes another rank. As `python FILE` (1 process) or under torchrun: entered once.

    Args:
        main: Function of one argument, the `Job`. What it returns is ignored.
    Raises:
        ScriptError: `main` can't be called with one argument, or run() was reached in a loader
            worker (the call must stand under ``if __name__ == "__main__":``).
    """
    wrong = mistakes.wrong_main(main)
    if wrong is not None:
        raise wrong
    if _driver is not None:
        _driver.drive(main)
        return
    if os.environ.get(INCARNATION_VARIABLE) or _is_child():
        raise ScriptError(mistakes.IN_CHILD)
    from trainmover.worker.plain import run_plain

    run_plain(main)


def current_job() -> Job:
    """The job of this process, for code that `main` does not hand it to.

    Raises:
        ScriptError: No `main` is running.
    """
    if _current is None:
        raise ScriptError("current_job() was called outside of main; call it from within main(job)")
    return _current


def set_current(job: Job | None) -> None:
    """Remember which job `main` runs in."""
    global _current
    _current = job


def set_driver(driver: Driver) -> None:
    """This process is a worker."""
    global _driver
    _driver = driver


def _is_child() -> bool:
    """Whether multiprocessing made this process (a loader worker imports the script again)."""
    is_importing = getattr(multiprocessing.current_process(), "_inheriting", False)
    return is_importing or multiprocessing.parent_process() is not None


def _failure_behind_the_loop(
    runtime: Runtime, stepper: Stepper, text: str, error: BaseException
) -> ScriptFailed:
    return ScriptFailed(
        incarnation=runtime.incarnation,
        rank=stepper.rank,
        step=stepper.step_index,
        text=text,
        error=f"{type(error).__name__}: {error}",
        was_running_out=False,
        is_machine_caused=False,
    )


class Driver:
    """Enters `main` as the I/O side orders, and says how each entry ended."""

    def __init__(self, runtime: Runtime, distributed: DistributedEntry) -> None:
        self._runtime = runtime
        self._distributed = distributed
        self.first: orders.RunMain
        """The order with which the script began to run."""

    def drive(self, main: Main) -> None:
        """Enter `main` until this process's part is over.

        Raises:
            ProcessEnds: It is over.
            ScriptAgain: `main` alone can't be entered as another rank.
        """
        order = self.first
        while True:
            order = self._enter(main, order)
            gc.collect()  # its frames are gone only now: nothing of the last entry stays
            if self._runtime.reads.in_script and order.rank != self.first.rank:
                raise ScriptAgain(order)

    def _enter(self, main: Main, order: orders.RunMain) -> orders.RunMain:
        runtime = self._runtime
        runtime.begin_entry(order)
        self._distributed.reset(lambda: runtime.start_groups(order))
        stepper = Stepper(runtime.host, order, runtime.watch)
        runtime.stepper = stepper
        job = Job(runtime.host, stepper)
        set_current(job)
        try:
            result = main(job)
        except Reentered as again:
            return self._again(again.order, job)
        except Left as left:
            print(f"trainmover: this process has left the job: {left}")
            raise ProcessEnds(exits.COMPLETED) from None
        except Halted as halted:
            raise ProcessEnds(halted.code) from None
        except SystemExit as error:
            if error.code not in (None, 0) or not job.was_finished:
                return self._raised(error, job)
            raise ProcessEnds(exits.COMPLETED) from None
        except (Exception, KeyboardInterrupt) as error:
            return self._raised(error, job)
        pending, runtime.host.pending_entry = runtime.host.pending_entry, None
        if pending is not None:
            return self._again(pending, job)
        return self._returned(job, result)

    def _raised(self, error: BaseException, job: Job) -> orders.RunMain:
        return self.failed(error, is_behind_undone_step=job.is_behind_undone_step)

    def _returned(self, job: Job, result: object) -> orders.RunMain:
        if not job.was_entered:
            return self.failed(ScriptError(mistakes.NO_LOOP))
        if not job.was_finished:
            return self.failed(ScriptError(mistakes.LOOP_LEFT_BY_EXCEPTION))
        if result is not None and job.is_primary:
            print(f"trainmover: main returned {result!r}; the value is not used")
        raise ProcessEnds(exits.COMPLETED)

    def _again(self, order: orders.RunMain, job: Job) -> orders.RunMain:
        """Let go of everything the last entry held before the next one allocates."""
        self._runtime.stepper = None
        self._runtime.watch.let_go()
        job.close()
        set_current(None)
        return order

    def failed(
        self, error: BaseException, *, is_behind_undone_step: bool = False
    ) -> orders.RunMain:
        """`main` (or the script around it) raised: tell it, and do what is ordered then."""
        runtime = self._runtime
        stepper = runtime.stepper
        if runtime.is_loader_worker():
            raise error
        mistakes.add_hint(error)
        refused = runtime.host.walk.abandon() if runtime.is_shadow() else ""
        if stepper is not None and stepper.is_shadow:
            why = refused or f"{type(error).__name__}: {error}"
            runtime.tell_finding("rehearsal", f"a standby failed and is not counted: {why}")
        # In front of main nothing has met a collective, whatever the channels are up to.
        is_running_out = runtime.host.is_tainted and stepper is not None
        text = "".join(traceback.format_exception(error))
        print(text, flush=True)
        if stepper is not None and stepper.phase == "finished":
            # Code behind the loop: all steps are done, so nobody is left who could give an order.
            runtime.link.tell(_failure_behind_the_loop(runtime, stepper, text, error))
            raise ProcessEnds(exits.SCRIPT_FAILED)
        runtime.post_from_main(
            MainFailed(
                rank=stepper.rank if stepper is not None else self.first.rank,
                step=stepper.step_index if stepper is not None else 0,
                text=text,
                error=refused or f"{type(error).__name__}: {error}",
                was_running_out=is_running_out or is_behind_undone_step,
                is_machine_caused=bool(machine_cause(error)),
            )
        )
        while True:
            order = runtime.orders.take()
            match order:
                case orders.RunMain():
                    return order
                case orders.Halt():
                    raise ProcessEnds(order.code)
                case orders.Leave() | orders.Finish():
                    raise ProcessEnds(exits.COMPLETED)
                case orders.Settle():
                    runtime.host.settled(order.plan)
                case _:
                    # Orders for a main that is gone; the lifecycle has moved on.
                    continue
