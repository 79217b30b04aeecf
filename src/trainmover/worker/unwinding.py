"""Exceptions that take the main thread out of user code. All are BaseException on purpose:
a script's `except Exception` must not swallow them."""

from __future__ import annotations

from trainmover.worker.orders import RunMain


class Left(BaseException):
    """This worker's rank has moved to another machine; `main` ends here and exit code is 0."""


class StepUndone(BaseException):
    """The attempt of a step did not count; caught by the step itself, never by the script."""


class Reentered(BaseException):
    """`main` is to be entered again, as `order` says."""

    def __init__(self, order: RunMain) -> None:
        super().__init__("main is entered again")
        self.order = order


class ScriptAgain(BaseException):
    """The whole script is to run again, because it has read the rank in front of `main`."""

    def __init__(self, order: RunMain) -> None:
        super().__init__("the script runs again")
        self.order = order


class Halted(BaseException):
    """The process ends for one reason."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason
