"""`trainmover switchover`: move ranks off machines while training goes on."""

from __future__ import annotations

import time
import uuid
from typing import Annotated

import msgspec
import typer

from trainmover.cli import operator
from trainmover.errors import ConfigError, TransportError
from trainmover.protocol.messages import OperatorReply, SwitchoverRequest


def switchover(
    machines: Annotated[list[str], typer.Argument(help="machines to take out of the job")],
    to: Annotated[
        list[str] | None, typer.Option("--to", help="standby for it; in the machines' order")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="wait until it has ended")] = True,
    timeout_s: Annotated[float, typer.Option("--timeout-s", help="longest wait")] = 300.0,
    job: operator.JobOption = None,
    run_dir: operator.RunDirOption = None,
    controller: operator.ControllerOption = None,
    token_file: operator.TokenOption = None,
    as_json: operator.JsonOption = False,
) -> int:
    """Move the ranks of MACHINES to standbys; ends with 1 when it was refused or aborted."""
    if to and len(to) != len(machines):
        raise ConfigError(f"expected one --to per machine ({len(machines)}), got {len(to)}")
    both = sorted(set(machines) & set(to or []))
    if both:
        raise ConfigError(f"a machine can't be switched over to itself: {', '.join(both)}")
    client = operator.connect(job, run_dir, controller, token_file)
    request = uuid.uuid4().hex[:12]
    reply = client.request(
        SwitchoverRequest(request=request, machines=tuple(machines), to=tuple(to or ()))
    )
    show(reply, as_json=as_json and (reply.is_final or not wait))
    deadline = time.monotonic() + timeout_s
    while reply.is_accepted and not reply.is_final and wait:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise ConfigError(f"the switchover has not ended within {timeout_s:g} s; it goes on")
        try:
            final = client.final_reply(request, left_s)
        except TransportError as error:
            raise TransportError(
                f"{error}; it had accepted the switchover: once it is restarted, `trainmover "
                "incidents` says whether it was made"
            ) from error
        if final is not None:
            reply = final
            show(reply, as_json=as_json)
    client.close()
    return 0 if reply.is_accepted else 1


def show(reply: OperatorReply, *, as_json: bool) -> None:
    """The controller's answer."""
    if as_json:
        operator.print_json(msgspec.to_builtins(reply))
    else:
        typer.echo(reply.text, err=not reply.is_accepted)
