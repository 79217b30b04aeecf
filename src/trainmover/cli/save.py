"""`trainmover save`: make a checkpoint at the next step boundary."""

from __future__ import annotations

import uuid

from trainmover.cli import operator
from trainmover.cli.switchover import show
from trainmover.protocol.messages import SaveRequest


def save(
    job: operator.JobOption = None,
    run_dir: operator.RunDirOption = None,
    controller: operator.ControllerOption = None,
    token_file: operator.TokenOption = None,
    as_json: operator.JsonOption = False,
) -> int:
    """Ask for a checkpoint; training goes on, `trainmover status` shows when it is durable."""
    client = operator.connect(job, run_dir, controller, token_file)
    reply = client.request(SaveRequest(request=uuid.uuid4().hex[:12]))
    client.close()
    show(reply, as_json=as_json)
    return 0 if reply.is_accepted else 1
