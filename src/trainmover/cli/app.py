"""The command `trainmover`: finds the subcommand's module, and turns bad input into one clear line.

Decides nothing but which module is loaded: only the one that is used, so that `status` answers at
once. A subcommand's module defines a function of the command's name with typer's annotations; an
`int` that it returns is the exit code.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any, Final

from trainmover.errors import ConfigError, JobStopped, TrainMoverError
from trainmover.protocol import exits

COMMANDS: Final[dict[str, str]] = {
    "run": "train a script; machines are played on this host, or are one host each",
    "controller": "run a job's controller on this host",
    "agent": "let this machine take part in a job",
    "status": "generation, step, who plays which rank, standbys",
    "switchover": "move machines' ranks to standbys",
    "incidents": "every switchover so far, with its phases",
    "stop": "stop a job at the next boundary, or now",
    "preempt": "say that machines are about to be taken away",
    "save": "make a checkpoint at the next boundary",
    "logs": "what workers printed, by rank and generation",
    "check": "find what would break a script later",
    "ckpt": "list, verify, compare, export and prune checkpoints",
    "simulate": "run the deciders in a seeded world of faults",
    "demo": "lose two machines on this host, and compare every number",
    "drill": "inject faults into real processes and compare numbers",
    "bench": "measure recovery, collectives, overhead, memory",
    "phases": "named phases of a switchover, from the code",
    "config": "all settings with their defaults",
}
"""Name and help line, in the order of the help. A name without a module is not offered."""

INTRODUCTION: Final = (
    "Fault-tolerant distributed PyTorch training: lose a machine, keep the numbers."
)


def commands() -> list[str]:
    """Names of the subcommands that are installed."""
    return [name for name in COMMANDS if importlib.util.find_spec(_module(name)) is not None]


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit code, after one line on stderr where something was wrong."""
    words = sys.argv[1:] if arguments is None else arguments
    if not words or words[0] in ("--help", "-h", "help"):
        print(help_text())
        return exits.COMPLETED if words else exits.BAD_USAGE
    if words[0] == "--version":
        from trainmover.edges.probes import version_of

        print(f"trainmover {version_of('trainmover')}")
        return exits.COMPLETED
    try:
        if words[0] not in commands():
            raise ConfigError(f"unknown command '{words[0]}'{_nearest(words[0])}")
        return _call(words[0], words[1:])
    except ConfigError as error:
        return _complain(error, exits.BAD_USAGE)
    except JobStopped as error:
        return _complain(error, error.code)
    except TrainMoverError as error:
        return _complain(error, exits.START_FAILED)
    except KeyboardInterrupt:
        return exits.INTERRUPTED
    except BrokenPipeError:
        return exits.COMPLETED  # whoever read our output has seen enough


def help_text() -> str:
    """What `trainmover --help` prints."""
    lines = [INTRODUCTION, "", "Usage: trainmover COMMAND [OPTIONS] ...", "", "Commands:"]
    lines += [f"  {name:<12} {COMMANDS[name]}" for name in commands()]
    return "\n".join([*lines, "", "`trainmover COMMAND --help` tells a command's options."])


def _call(name: str, arguments: list[str]) -> int:
    import typer

    module = importlib.import_module(_module(name))
    application = typer.Typer(
        add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
    )
    settings = getattr(module, "CONTEXT_SETTINGS", None)
    application.command(name, context_settings=settings)(_exiting(getattr(module, name)))
    try:
        application(args=arguments, prog_name=f"trainmover {name}")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return exits.COMPLETED


def _exiting(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with its result as the exit code."""

    @functools.wraps(function)
    def called(*args: Any, **options: Any) -> None:
        code = function(*args, **options)
        if isinstance(code, int) and code != 0:
            raise SystemExit(code)

    return called


def _module(name: str) -> str:
    return f"trainmover.cli.{name}"


def _nearest(name: str) -> str:
    import difflib

    close = difflib.get_close_matches(name, commands(), n=1)
    return f"; did you mean '{close[0]}'?" if close else "; `trainmover --help` lists all"


def _complain(error: TrainMoverError, code: int) -> int:
    print(f"trainmover: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
