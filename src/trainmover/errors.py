"""Every exception trainmover raises on purpose.

    TrainMoverError
    +-- ConfigError            a value the user gave is wrong (exit code 2)
    +-- ProtocolError          a message that must not exist
    |   +-- LocalProtocolError     we were about to send it
    |   +-- RemoteProtocolError    a peer sent it
    +-- TransportError         a connection could not be made or kept
    |   +-- ConnectTimeout         nobody answered before the deadline
    |   +-- GenerationMismatch     the peer belongs to another generation
    |   +-- AuthenticationFailed   the peer does not know the job's secret
    +-- CollectiveMismatch     two ranks called different collectives
    +-- TrackError             track() was given something that can't be captured
    +-- ScriptError            the script uses the API in a way that can't be exact
    +-- StateMismatch          digests or structure of transferred state differ
    +-- IncompatibleMachine    a machine differs from the job's in something that changes numbers
    +-- SwitchoverAborted      a switchover ended in the old membership
    +-- BaselineFailed         a job under plain torchrun, run for comparison, did not come back
    +-- DrillFailed            a drill's job did not do in time what the drill waits for
    +-- JobStopped             the job has ended for one reason; carries its exit code

Messages say what was expected, what was seen and what to do next.
"""

from __future__ import annotations


class TrainMoverError(Exception):
    """Root of all exceptions raised by trainmover."""


class ConfigError(TrainMoverError):
    """A value given by the user is wrong."""


class ProtocolError(TrainMoverError):
    """A message that the protocol forbids."""


class LocalProtocolError(ProtocolError):
    """This process was about to send a forbidden message: a bug here."""


class RemoteProtocolError(ProtocolError):
    """A peer sent a forbidden or malformed message."""


class TransportError(TrainMoverError):
    """A connection could not be made or kept."""


class ConnectTimeout(TransportError):
    """A peer did not answer before the deadline."""


class GenerationMismatch(TransportError):
    """A peer belongs to another generation."""


class AuthenticationFailed(TransportError):
    """A peer does not know the job's secret."""


class CollectiveMismatch(TrainMoverError):
    """Two ranks called different collectives, shapes or dtypes at the same place."""


class TrackError(TrainMoverError):
    """`track()` was given something that can't be captured; the message names it."""


class ScriptError(TrainMoverError):
    """The script uses the API in a way that can't be made exact; the message names the remedy."""


class StateMismatch(TrainMoverError):
    """Transferred state has another digest or structure than its source."""


class IncompatibleMachine(TrainMoverError):
    """A machine differs from the job's in something that would change the numbers."""


class SwitchoverAborted(TrainMoverError):
    """A switchover ended in the old membership."""


class BaselineFailed(TrainMoverError):
    """A job under plain torchrun, run for comparison, failed or did not come back in time."""


class DrillFailed(TrainMoverError):
    """A drill's job did not do in time what the drill waits for, or left something behind."""


class JobStopped(TrainMoverError):
    """The job has ended for one reason.

    Attributes:
        code: Exit code, see `trainmover.protocol.exits`.
    """

    def __init__(self, reason: str, code: int) -> None:
        super().__init__(reason)
        self.code = code
