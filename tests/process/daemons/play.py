"""One embedded job of toy workers: ``python -m tests.process.daemons.play DIRECTORY OPTIONS``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from trainmover.cli.screen import ConsoleScreen
from trainmover.daemons import settings
from trainmover.daemons.supervisor import JobPlan, Supervisor
from trainmover.errors import ConfigError


def main() -> int:
    """Arguments: run directory, JSON of JobPlan fields and settings."""
    directory, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    assignments = options.pop("settings", {})
    arguments = tuple(options.pop("arguments"))
    plan = JobPlan(
        script=__file__,
        arguments=arguments,
        run_directory=directory,
        is_cold=options.pop("is_cold", True),
        entry="tests.process.daemons.toy:run",
        # Toys run no first iteration that could be recorded for a standby.
        settings=settings.flatten(settings.resolve({"rehearsal.answers": "loopback"}, assignments)),
        **options,
    )
    try:
        return Supervisor(plan, ConsoleScreen(None, shows_progress=False)).run()
    except ConfigError as error:
        print(f"trainmover: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
