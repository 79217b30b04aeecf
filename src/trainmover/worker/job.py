"""The user's side of a job: `trainmover.Job`, given to `main`."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from trainmover.errors import ScriptError, TrackError
from trainmover.protocol import exits
from trainmover.worker import mistakes
from trainmover.worker.batches import Batches
from trainmover.worker.frames import is_leaving_by_break
from trainmover.worker.hand_made import hand_made_state, load_hand_made
from trainmover.worker.replicas import confirm_replicas
from trainmover.worker.scan import find_untracked
from trainmover.worker.shadow import Keeper
from trainmover.worker.step import Step
from trainmover.worker.unwinding import Halted, Left, Reentered, StepUndone

if TYPE_CHECKING:
    from trainmover.worker.first_iterations import FirstIterations
    from trainmover.worker.host import Host
    from trainmover.worker.stepper import Stepper

Fn = TypeVar("Fn", bound=Callable[..., object])
TAIL_WATCH_STEPS = 3


class Job:
    """What a training script sees of trainmover. One per entry of `main`.

    Attributes:
        run_id: Stable over generations, machines and processes; for trackers (`id=`, resume).
        device_type: "cpu", or the accelerator torch finds.
    """

    def __init__(self, host: Host, stepper: Stepper) -> None:
        self._host = host
        self._stepper = stepper
        self._every: list[tuple[int, Callable[[], object]]] = []
        self._tracked: dict[str, object] = {}
        self._ignored: tuple[object, ...] = ()
        self._has_steps = False
        self._has_scanned = False
        self._is_loop_over = False
        self._step: Step | None = None
        self.run_id = host.run_id
        self.device_type = "cpu"

    # ------------------------------------------------------------------ who am I

    @property
    def rank(self) -> int:
        """Global rank. On a standby, the rank it rehearses.

        Reading it while `main` builds its objects bakes it in: then another rank is adopted by
        entering `main` again.
        """
        self._host.note_rank_read()
        return self._stepper.rank

    @property
    def world_size(self) -> int:
        """Number of ranks; never changes."""
        return self._stepper.world_size

    @property
    def local_rank(self) -> int:
        """Rank within the machine."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def device(self) -> torch.device:
        """Device of this rank."""
        return torch.device(self.device_type)

    @property
    def is_primary(self) -> bool:
        """True on rank 0, never on a standby. Ask it each time: it moves with the rank."""
        return self._stepper.rank == 0 and not self._stepper.is_shadow

    @property
    def is_shadow(self) -> bool:
        """True on a standby that has no rank yet."""
        return self._stepper.is_shadow

    @property
    def generation(self) -> int:
        """Number of the current membership; grows by each switchover."""
        return self._host.generation

    # ------------------------------------------------------------------ building

    def seed(self, seed: int, *, per_rank: bool = True) -> None:
        """Seed Python, NumPy (if loaded) and torch with `seed` plus the rank.

        The runtime knows this read of the rank: generators are part of a rank's personal state,
        so a standby that was seeded as another rank can still take over in place.
        """
        value = seed + (self._stepper.rank if per_rank else 0)
        random.seed(value)
        torch.manual_seed(value)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(value % 2**32)

    def track(self, *, ignore: list[object] | None = None, **objects: object) -> None:
        """Name everything that makes up this rank's state: models, optimizers, schedulers,
        scalers, EMA copies, `trainmover.Value`s, anything with `state_dict`/`load_state_dict`.

        Called on: every rank, once, after building and before the first step; same names.

        Raises:
            TrackError: Something can't be captured; the message names it and the remedy.
        """
        late = mistakes.late_track(self._step)
        if late is not None:
            raise late
        self._stepper.track(objects, tuple(ignore or ()))
        self._tracked = dict(objects)
        self._ignored = tuple(ignore or ())

    def batches(self, source: Any, **options: Any) -> Batches:
        """Iterator over `source` (a DataLoader, a stateful loader, or a callable), for ever:
        it goes on over epochs. Its position is part of the state; a batch of an interrupted step
        is handed out again.

        Args:
            source: `DataLoader`, torchdata `StatefulDataLoader`, or a callable without arguments.
            **options: See `trainmover.worker.batches.Batches`.
        """
        if self._has_steps:
            raise TrackError("job.batches() was called after the first step; call it before")
        if hasattr(source, "__iter__") and any(b.source is source for b in self._stepper.batches):
            raise TrackError(
                f"job.batches() got the same {type(source).__name__} twice: two readers of one "
                "loader have no position; keep what the first call has returned"
            )
        batches = Batches(source, **options)
        self._stepper.batches.append(batches)
        return batches

    def every(self, steps: int) -> Callable[[Fn], Fn]:
        """Register a function to be run between steps, after every `steps` committed steps.

        It may use collectives (evaluation, hand-made saves): a loss inside it undoes and repeats
        it, on a joiner too. It runs at least once per due boundary.
        """
        if steps < 1:
            raise ScriptError(f"job.every({steps}): expected at least 1")

        def register(fn: Fn) -> Fn:
            self._every.append((steps, fn))
            return fn

        return register

    def validation(self, fn: Fn) -> Fn:
        """Register a fixed validation batch: it runs when state is saved, and again once that state
        has been restored; the results must be the same, bit for bit.

        Args:
            fn: Without arguments; a number, a tensor, or a dict of those. It runs in eval mode
                without gradients and may only compute; random numbers it draws are put back.
        """
        self._stepper.restored.register(fn)
        return fn

    # ------------------------------------------------------------------ the loop

    def steps(self, total: int) -> Iterator[Step]:
        """Steps up to `total` in all (not `total` more): resumes where the job is.

        Called on: every rank, once. Collective: each step has one gate among all ranks.

        Raises:
            Left: This rank has moved to another machine (a BaseException; let it pass).
        """
        if self._has_steps:
            raise ScriptError("job.steps() was called twice; a job has one loop")
        self._has_steps = True
        self._host.end_build()
        mistakes.check_names(self._stepper)
        confirm_replicas(self._stepper)
        stepper = self._stepper
        total = min(total, self._host.config.max_steps or total)
        is_granted = False
        if stepper.is_shadow:
            yield from self._shadow_steps(total)
            stepper.park_standby()
            is_granted = True
        while True:
            if not is_granted and not stepper.has_rolled_back:
                stepper.boundary()
            is_granted = stepper.has_rolled_back = False
            index = stepper.step_index
            if stepper.entry.restore is not None and not self._has_scanned:
                self._scan()
            if stepper.check is not None:
                total = stepper.check.total(total, self._host.generation, index)
            self._run_every(index)
            if index >= total:
                if stepper.finishing.run():
                    break
                continue
            step = self._step = Step(stepper, stepper.metrics, index)
            first = self._first_iterations()
            live = self._host.walk
            if first is not None:
                first.before_step()
            elif live is not None and live.coverage is not None:
                live.before_live_step(stepper.inventory)
            try:
                yield step
            except GeneratorExit:
                self._finish_early(step, total)
                raise
            if first is not None:
                first.after_step(was_undone=step.was_undone)
            elif live is not None and live.coverage is not None:
                live.after_live_step(step.index)
            self._check_body(step)
            is_granted = self._is_behind(step)
        self._is_loop_over = True

    def _is_behind(self, step: Step) -> bool:
        """A joiner for whom all parts of `step` were behind: the next one has leave to run."""
        stepper = self._stepper
        if step.was_undone or stepper.phase != "running":
            return False
        stepper.rearm()
        stepper.phase = "running"
        return True

    def _first_iterations(self) -> FirstIterations | None:
        """What watches this member's first iterations; None once they are known."""
        stepper = self._stepper
        if stepper.entry.is_loopback:
            return None
        if stepper.first is None:
            stepper.first = self._host.watch_first(stepper.inventory, stepper.rank)
        first = stepper.first
        return None if first is None or first.is_complete else first

    def _shadow_steps(self, total: int) -> Iterator[Step]:
        stepper = self._stepper
        keeper = Keeper(stepper.inventory, stepper.batches)
        walk, shadow = self._host.walk, stepper.shadow
        while shadow.is_due(is_settled=stepper.watch.is_settled):
            stepper.begin_shadow()
            step = self._step = Step(stepper, stepper.metrics, shadow.rounds - 1)
            if walk is not None:
                walk.before_step(stepper.inventory)
            yield step
            if walk is not None:
                walk.after_step()
            if not step.was_entered:
                raise mistakes.never_entered(step.index)
            stepper.watch.end()
        stepper.attempts = shadow.made
        stepper.phase = "boundary"
        keeper.put_back()

    def _run_every(self, index: int) -> None:
        """Functions due at this boundary.

        Where a loss strikes one of them, the step behind it runs out and is undone, and they are
        called again. The attempt is never left out: DDP rebuilds its buckets in the second one,
        on every rank or on none (decision 0003).
        """
        if self._stepper.parts_done:
            return
        try:
            self._stepper.restored.at_attempt()
            for steps, fn in self._every if index else ():
                if index % steps == 0:
                    fn()
        except (Exception, SystemExit):
            if not self._host.is_tainted:
                raise
        except StepUndone:
            # Raised on invented values only: the step's own gate undoes.
            return

    def _check_body(self, step: Step) -> None:
        if not step.was_entered:
            raise mistakes.never_entered(step.index)
        if step.was_undone:
            return
        self._stepper.end_of_body(tuple(step.parts))
        if step.index == 0:
            self._check_first_step()

    def _check_first_step(self) -> None:
        stepper = self._stepper
        for batches in stepper.batches:
            if batches.handed_out == 0 and batches.epoch == 0:
                stepper.logbook.finding("unused-batches", mistakes.no_batch())
        self._scan()

    def _scan(self) -> None:
        """What is alive and not tracked would begin anew; once, in front of a resumed step."""
        stepper = self._stepper
        if self._has_scanned or not self._host.config.does_scan or not self._host.is_managed:
            return
        self._has_scanned = True
        known = [*self._tracked.values(), *stepper.batches]
        known += [batches.source for batches in stepper.batches]
        for found in find_untracked(known, self._ignored):
            if self._host.config.is_strict:
                raise TrackError(f"{found.message} (worker.is_strict)")
            stepper.logbook.finding("untracked", found.message)

    def _finish_early(self, step: Step, total: int) -> None:
        """The script left the loop (`break`): all ranks must leave at the same step.

        Runs while the generator is closed: what is raised here would be lost, so the process ends
        from here where it has to, and code behind the loop does not run.
        """
        stepper = self._stepper
        if stepper.is_shadow or not is_leaving_by_break(sys._getframe(2)):
            return  # an exception is on its way through the loop: its handler decides
        self._is_loop_over = True
        try:
            if step.was_undone:
                stepper.give_up(f"step {step.index}: the script left the loop on invented values")
            if stepper.tail.is_void:
                stepper.give_up(f"step {step.index}: the loop was left in a tail cut short")
            if stepper.phase == "tail":
                stepper.end_of_body(tuple(step.parts))
            # In front of its `with step` the script stands at that step's boundary already.
            is_granted = stepper.phase == "running" and not step.was_entered
            while True:
                if not is_granted:
                    stepper.boundary()
                is_granted = False
                if stepper.has_rolled_back:
                    stepper.give_up("rolled back behind the loop's end, which can't be run again")
                if stepper.finishing.run():
                    return
        except Reentered as again:
            self._host.enter_again(again.order)
        except Left:
            self._host.end_now(exits.COMPLETED)
        except Halted as halted:
            self._host.end_now(halted.code)

    @property
    def is_behind_undone_step(self) -> bool:
        """Whether the code behind a step runs that was undone: its values were invented."""
        return self._step is not None and self._step.was_undone

    @property
    def was_finished(self) -> bool:
        """Whether the loop has ended on all ranks."""
        return self._is_loop_over or not self._has_steps

    @property
    def was_entered(self) -> bool:
        """Whether `steps` was called."""
        return self._has_steps

    def close(self) -> None:
        """End loader workers and let go of the script's objects."""
        for batches in self._stepper.batches:
            batches.close()
        self._every.clear()
        self._tracked.clear()
        self._ignored = ()

    # ------------------------------------------------------------------ the rest

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name a stretch outside the steps ("eval", "rollout"), so that it is judged by limits
        of its own and shows in the status."""
        before = self._stepper.phase
        self._host.note(name, self._stepper.version.step)
        try:
            yield
        finally:
            self._host.note(before, self._stepper.version.step)

    def state_dict(self) -> dict[str, Any]:
        """State of all tracked objects and loaders of this rank, for hand-made checkpoints."""
        return hand_made_state(self._stepper)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what `state_dict` gave; call it before the first step."""
        if self._has_steps:
            raise ScriptError("job.load_state_dict() was called after the first step")
        load_hand_made(self._stepper, state)
