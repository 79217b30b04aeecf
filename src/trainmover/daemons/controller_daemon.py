"""The controller's process: one port, one journal, one decider.

Decides nothing about the job. It keeps what people want to see (losses, findings, console lines),
answers their requests, and refuses an agent that was started for a job of another size. Run it with
`python -m trainmover.daemons.controller_daemon OPTIONS.json`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any, assert_never

import msgspec

from trainmover import controller
from trainmover.controller import (
    Append,
    EndJob,
    LookIntoStorage,
    PhaseReached,
    ToAgent,
    ToOperator,
)
from trainmover.daemons import settings as settings_of
from trainmover.daemons.looking import Looker, beside
from trainmover.daemons.loop import Decider, DeciderLoop
from trainmover.daemons.operator_views import OperatorViews
from trainmover.daemons.options import ControllerOptions, read_options
from trainmover.daemons.process import open_log, run_daemon, watch_parent
from trainmover.daemons.records import JobRecords, read_lines
from trainmover.daemons.repeated_losses import (
    Line,
    LossFile,
    Repeats,
    is_directory,
    loss_path,
    losses_of,
)
from trainmover.daemons.resume import choose_start, waits_for_agents
from trainmover.daemons.run_directory import (
    ControllerFile,
    FailureFile,
    OutcomeFile,
    RunDirectory,
    read_struct,
    write_struct,
)
from trainmover.edges import clock, faults, seal
from trainmover.edges.controller_server import ControllerServer, ServerHandlers
from trainmover.edges.journal import Journal
from trainmover.errors import ConfigError
from trainmover.protocol import exits
from trainmover.protocol.journal import (
    AnyRecord,
    CheckpointMissed,
    IncidentClosed,
    NoticeRecorded,
    PlanRecorded,
    StoppedRecorded,
    TermTaken,
    decode_record,
    encode_record,
)
from trainmover.protocol.messages import (
    AgentHello,
    CadenceChosen,
    Coverage,
    Finding,
    FromAgentMessage,
    FromWorker,
    Refused,
    RestoreChecked,
    ScriptFailed,
    SnapshotsHeld,
    StepLogged,
    StopRequest,
)
from trainmover.topology.domains import merged_labels
from trainmover.topology.keeping import read_keeping
from trainmover.worker.config import WorkerConfig, read_settings

log = logging.getLogger("controller")

WHO = "controller"
LOSSES_LIMIT_S = 2.0
"""At the end, for losses that are still to be written beside the checkpoints."""


class ControllerDaemon:
    """Everything of one controller's life."""

    def __init__(self, options: ControllerOptions, journal: Journal) -> None:
        self._options = options
        self._directory = RunDirectory(Path(options.run_directory))
        self._journal = journal
        self._settings = settings_of.unflatten(options.spec.settings)
        self._worker = read_settings(WorkerConfig, "worker", dict(options.spec.settings))
        self._repeats = Repeats(self._worker.compared)
        self._records = self._open_records()
        token = seal.read_token(self._directory.token)
        self._looker = Looker(
            resume=options.resume,
            run_id=options.spec.run_id,
            keeping=read_keeping(options.spec.settings),
            secret=seal.channel_secret(token, options.spec.run_id),
        )
        self._looks: set[asyncio.Task[None]] = set()
        self._views = OperatorViews(self._records, self._post_request, self._view)
        self._server = ControllerServer(
            token,
            ServerHandlers(
                on_linked=lambda name: self._post(controller.AgentLinked(machine=name)),
                on_unlinked=lambda name: self._post(controller.AgentUnlinked(machine=name)),
                on_message=self._hear,
                answer=self._views.answer,
            ),
        )
        self._topology = dict(options.topology)
        self._worth = ""
        self._loop: DeciderLoop[controller.State, controller.Event, controller.Command]
        self._outcome: OutcomeFile | None = None
        self._is_stopped = False
        self._starting: asyncio.Task[Any] | None = None
        """While there is no decider: what a lost parent ends."""

    async def run(self) -> int:
        """Until the decider ends the job; the job's exit code."""
        self._starting = asyncio.current_task()
        if self._options.is_embedded:
            watch_parent(self._lose_parent)
        records = [decode_record(row.data) for row in self._journal.read_all()]
        term = self._journal.take_term()
        self._append(TermTaken(term=term))
        records.append(TermTaken(term=term))
        config = settings_of.build(
            "controller",
            controller.Config,
            self._settings,
            standby_machines=self._options.standbys,
        )
        has_begun = any(isinstance(record, PlanRecorded) for record in records)
        restored = None if has_begun else await self._begin_from()
        opening = controller.initial_state(
            config, self._options.spec, records, term, clock.now(), restored
        )
        decider: Decider[Any, Any, Any] = Decider(
            transition=controller.transition,
            next_deadline=controller.next_deadline,
            tick=controller.Tick(),
        )
        self._loop = DeciderLoop(decider, opening.state, self._act, "controller")
        self._starting = None
        await self._listen(term)
        for command in opening.commands:
            self._act(command)
        self._take_signals()
        await self._loop.run()
        await self._server.close()
        self._records.close(LOSSES_LIMIT_S)
        return exits.INTERRUPTED if self._outcome is None else self._outcome.code

    def _open_records(self) -> JobRecords:
        spec = self._options.spec
        place = read_keeping(spec.settings).checkpoint.directory
        losses = None
        if is_directory(place):
            losses = LossFile(place, spec.run_id, spec.world_size)
        return JobRecords(self._directory.path, self._repeats, losses)

    def _expect_losses(self, directory: str, restored: controller.Restored) -> None:
        """What the run that wrote the checkpoint did behind it is done again now."""
        lines = read_lines(loss_path(directory, restored.run_id), Line)
        expected = losses_of(lines, restored.version.step, self._options.spec.world_size)
        self._repeats.expect(expected, f"steps done again behind checkpoint {restored.name}")

    def _check_mismatch(self) -> None:
        """A check may have found that the run does not repeat itself."""
        if self._records.has_mismatch and self._worker.stops_on_mismatch and not self._is_stopped:
            self._is_stopped = True
            self._records.say("failure", "worker.restore_mismatch is 'stop': the job ends")
            self._post_request(StopRequest(request="restore-mismatch", mode="now"))

    async def _begin_from(self) -> controller.Restored | controller.Unchosen | None:
        """What is known of it before any agent is there."""
        if waits_for_agents(self._options.resume, self._looker.keeping):
            return controller.Unchosen()
        keeping = self._looker.keeping
        restored, notes = await beside(choose_start, self._options.resume, keeping)
        await self._tell_start(restored, notes)
        return restored

    async def _tell_start(self, restored: controller.Restored | None, notes: list[str]) -> None:
        for note in notes:
            self._records.say("restore", note)
        directory = self._looker.keeping.checkpoint.directory
        if restored is not None and restored.run_id and is_directory(directory):
            await beside(self._expect_losses, directory, restored)

    async def _look(self, order: controller.LookIntoStorage) -> None:
        seen, notes = await beside(self._looker.look, order)
        await self._tell_start(seen.found if order.is_start else None, notes)
        self._post(seen)

    async def _listen(self, term: int) -> None:
        path = self._directory.path / "controller.json"
        before = read_struct(path, ControllerFile)
        host, port = self._options.host, self._options.port
        if before is not None and port == 0:
            try:
                await self._server.start(host, before.port)
            except ConfigError as error:
                # Somebody else was faster; local agents read the new port from the file.
                log.warning("%s; taking another port", error)
        if self._server.port == 0:
            await self._server.start(host, port)
        write_struct(
            path,
            ControllerFile(
                host=self._options.host, port=self._server.port, pid=os.getpid(), term=term
            ),
        )
        log.info("term %d, listening on %s:%d", term, self._options.host, self._server.port)

    def _take_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            loop.add_signal_handler(number, self._stop_by_signal)

    def _stop_by_signal(self) -> None:
        """A controller that is asked to go leaves the job alone: agents and workers go on."""
        log.info("asked to end by a signal; training goes on, another controller may take over")
        self._loop.stop()

    def _lose_parent(self) -> None:
        log.error("whoever started this job is gone: the job ends")
        if self._starting is not None:
            self._starting.cancel()  # what it looks for in storage, nobody is there to use
            return
        self._post(controller.FromOperator(body=StopRequest(request="parent-gone", mode="now")))
        asyncio.get_running_loop().call_later(10.0, self._loop.stop)

    # ------------------------------------------------------------------------ events

    def _post(self, event: controller.Event) -> None:
        self._loop.post(event)

    def _post_request(self, message: Any) -> None:
        self._loop.post(controller.FromOperator(body=message))

    def _hear(self, machine: str, message: FromAgentMessage) -> None:
        match message:
            case FromWorker(body=StepLogged() as logged):
                self._records.add_step(logged)
                self._check_mismatch()
                return
            case FromWorker(body=RestoreChecked() as check):
                self._records.add_check(check)
                self._check_mismatch()
                return
            case FromWorker(body=Finding() as finding):
                self._records.add_finding(finding)
                return
            case FromWorker(body=CadenceChosen() as chosen):
                self._records.cadence = chosen
                return
            case FromWorker(body=Coverage() as coverage):
                self._records.add_coverage(coverage)
                return
            case FromWorker(body=ScriptFailed() as failed) if not failed.was_running_out:
                self._keep_failure(machine, failed)
            case AgentHello() if (reason := self._wrong_size(message)) is not None:
                log.warning("agent %s refused: %s", machine, reason)
                refused = Refused(term=self._journal.term, reason=reason, code=exits.BAD_USAGE)
                self._server.send(machine, refused)
                return
            case AgentHello(labels=own):
                labels = merged_labels(self._topology.get(machine, ()), own)
                message = msgspec.structs.replace(message, labels=labels)
            case SnapshotsHeld():
                self._tell_worth()
        self._post(controller.FromAgent(machine=machine, body=message))

    def _tell_worth(self) -> None:
        """What copies are worth, at the start and whenever it changes."""
        text = controller.placement_text(self._loop.state)
        if text and text != self._worth:
            self._worth = text
            self._records.say("copies", text)

    def _keep_failure(self, machine: str, failed: ScriptFailed) -> None:
        where = f"rank {failed.rank}, step {failed.step}, {machine}"
        text = f"the script raised ({where}): {failed.error}"
        if not self._records.has_said(text):
            self._records.say("failure", text)
        path = self._directory.path / "failure.json"
        if not path.exists():
            first = FailureFile(
                rank=failed.rank,
                step=failed.step,
                machine=machine,
                error=failed.error,
                text=failed.text,
            )
            write_struct(path, first)

    def _wrong_size(self, hello: AgentHello) -> str | None:
        told = dict(hello.labels).get("nnodes", "")
        mine = self._options.node_count
        if not mine or not told or told == str(mine):
            return None
        return (
            f"this host was started with --nnodes {told}, the controller's with {mine}: "
            "use the same command on all hosts"
        )

    # ---------------------------------------------------------------------- commands

    def _act(self, command: controller.Command) -> None:
        match command:
            case Append(record=record):
                self._append(record)
            case ToAgent(machine=machine, body=body):
                self._server.send(machine, body)  # lost without a link; it comes again
            case ToOperator(reply=reply):
                self._views.reply(reply)
            case PhaseReached(name=name, number=number):
                faults.reached(name, WHO, number)
            case LookIntoStorage():
                looking = asyncio.create_task(self._look(command))
                self._looks.add(looking)
                looking.add_done_callback(self._looks.discard)
            case EndJob(code=code, reason=reason):
                self._end(code, reason)
            case _ as never:
                assert_never(never)

    def _append(self, record: AnyRecord) -> None:
        self._journal.append(encode_record(record))
        match record:
            case IncidentClosed(report=report):
                self._records.add_incident(report)
            case CheckpointMissed():
                self._records.add_missed(record)
            case StoppedRecorded(code=code, reason=reason) if self._loop.state.stop_by:
                # Whoever started us may be killed before the last process has ended.
                self._write_outcome(code, reason)
            case NoticeRecorded(machines=machines, grace_s=grace_s, choice=choice):
                who = ", ".join(machines) or "the job"
                left = f" in {grace_s:.0f} s" if grace_s else ""
                self._records.say("notice", f"{who} is to end{left}: {choice}")

    def _write_outcome(self, code: int, reason: str) -> None:
        state = self._loop.state
        self._outcome = OutcomeFile(
            code=code, reason=reason, generation=state.generation, step=state.step
        )
        write_struct(self._directory.path / "outcome.json", self._outcome)

    def _end(self, code: int, reason: str) -> None:
        self._write_outcome(code, reason)
        self._records.say("end", reason)
        log.info("job ends with %d: %s", code, reason)
        self._loop.stop()

    def _view(self) -> msgspec.Struct:
        return controller.status(self._loop.state, clock.now())


def main(arguments: list[str]) -> int:
    """Command line of the process."""
    options = read_options(Path(arguments[0]), ControllerOptions)
    assert isinstance(options, ControllerOptions)
    return serve(options)


def serve(options: ControllerOptions) -> int:
    """Run the controller until the job ends; its exit code."""
    directory = RunDirectory(Path(options.run_directory))
    directory.create()
    open_log(directory.logs / "controller.log")

    async def body() -> int:
        with Journal(directory.journal) as journal:
            return await ControllerDaemon(options, journal).run()

    return run_daemon("controller", body)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
