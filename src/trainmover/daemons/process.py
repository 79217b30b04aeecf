"""What every daemon process does: log file, end with its parent, exit code of a bug."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import traceback
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final

from trainmover.edges import heap
from trainmover.errors import ConfigError, TrainMoverError
from trainmover.protocol import exits

CRASHED: Final = 70
"""Exit code of a daemon that ended by a bug: whoever started it may start it again."""


def open_log(path: Path) -> None:
    """Log to `path` (appended) and let uncaught output go there, too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    form = "%(asctime)s.%(msecs)03d %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(
        filename=path, level=logging.INFO, format=form, datefmt="%H:%M:%S", force=True
    )


def watch_parent(on_gone: Callable[[], None]) -> None:
    """Call `on_gone` when standard input is closed: the process that started us has ended."""
    loop = asyncio.get_running_loop()
    descriptor = sys.stdin.fileno()
    os.set_blocking(descriptor, False)

    def look() -> None:
        try:
            data = os.read(descriptor, 4096)
        except BlockingIOError:
            return
        if not data:
            loop.remove_reader(descriptor)
            on_gone()

    loop.add_reader(descriptor, look)


def run_daemon(name: str, body: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """Run to the end. A wrong value is one clear line; a bug is a traceback in the log and 70."""
    try:
        return asyncio.run(_run_small(body))
    except ConfigError as error:
        logging.getLogger(name).error("%s", error)
        print(f"trainmover {name}: {error}", file=sys.stderr, flush=True)
        return exits.BAD_USAGE
    except (TrainMoverError, asyncio.CancelledError) as error:
        logging.getLogger(name).error("%s: %s", type(error).__name__, error)
        print(f"trainmover {name}: {error}", file=sys.stderr, flush=True)
        return exits.START_FAILED
    except BaseException as error:
        logging.getLogger(name).exception("the daemon ends by a bug")
        text = "".join(traceback.format_exception_only(error)).strip()
        print(f"trainmover {name}: ends by a bug: {text}", file=sys.stderr, flush=True)
        return CRASHED


async def _run_small(body: Callable[[], Coroutine[Any, Any, int]]) -> int:
    upkeep = asyncio.create_task(heap.keep_small(), name="upkeep")
    try:
        return await body()
    finally:
        upkeep.cancel()
