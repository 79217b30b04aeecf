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
    |   +-- RestoreMismatch        restored state gives other results than when it was saved
    +-- IncompatibleMachine    a machine differs from the job's in something that changes numbers
    +-- SwitchoverAborted      a switchover ended in the old membership
    +-- SnapshotSkipped        no snapshot could be taken this time; training goes on
    +-- CheckpointError        a durable checkpoint could not be written, read or chosen
    |   +-- ManifestMissing        no committed checkpoint of that name
    |   +-- ManifestCorrupt        a manifest that contradicts its own checksum or structure
    |   +-- ShardMissing           a file that the manifest names is not there
    |   +-- ShardCorrupt           a file or an entry differs from its recorded checksum
    |   +-- LayoutMismatch         shape, dtype or name asked for is not what was saved
    |   +-- CheckpointFenced       a later term or generation has committed already
    |   +-- NothingToRestore       something was asked for and nothing valid is there
    |   +-- StorageFailed          the storage refused, with path and reason
    |       +-- StorageFull            no space or no inodes
    |       +-- StorageDenied          no permission, or a read-only file system
    |       +-- StorageVanished        the directory has gone
    |       +-- StorageHung            no answer before the deadline
    |       +-- DiskLost               another machine's own disk can't be read any more
    +-- RecordingError         a recording can't be read, or belongs to something else
    +-- RehearsalMismatch      a standby called another collective than its role's recording has
    +-- RehearsalRefused       a standby's script touched what belongs to the live job
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


class RestoreMismatch(StateMismatch):
    """Restored state gives other results than it gave when it was saved."""


class IncompatibleMachine(TrainMoverError):
    """A machine differs from the job's in something that would change the numbers."""


class SwitchoverAborted(TrainMoverError):
    """A switchover ended in the old membership."""


class SnapshotSkipped(TrainMoverError):
    """No snapshot could be taken this time, for want of memory or of a free slot."""


class CheckpointError(TrainMoverError):
    """A durable checkpoint could not be written, read or chosen."""


class ManifestMissing(CheckpointError):
    """There is no committed checkpoint of that name."""


class ManifestCorrupt(CheckpointError):
    """A manifest contradicts its own checksum or structure."""


class ShardMissing(CheckpointError):
    """A file that the manifest names is not there, on any tier that was tried."""


class ShardCorrupt(CheckpointError):
    """A file or an entry differs from its recorded checksum; the message names it."""


class LayoutMismatch(CheckpointError):
    """The shape, dtype or name asked for is not what was saved."""


class CheckpointFenced(CheckpointError):
    """A later term or generation has committed a checkpoint: this writer has been replaced."""


class NothingToRestore(CheckpointError):
    """A checkpoint was asked for, and nothing valid is there."""


class StorageFailed(CheckpointError):
    """The storage refused; the message carries the path and the reason."""


class StorageFull(StorageFailed):
    """No space, no inodes or no quota left."""


class StorageDenied(StorageFailed):
    """No permission, or a read-only file system."""


class StorageVanished(StorageFailed):
    """The checkpoint directory has gone."""


class StorageHung(StorageFailed):
    """The storage gave no answer before the deadline."""


class DiskLost(StorageFailed):
    """Another machine's own disk can't be read: its agent gives no answer, or is gone."""


class RecordingError(TrainMoverError):
    """A recording of collectives can't be read, or was made of another script or layout."""


class RehearsalMismatch(TrainMoverError):
    """A rehearsing standby called another collective than the recording of its role has."""


class RehearsalRefused(TrainMoverError, PermissionError):
    """A rehearsing standby's script touched what belongs to the live job; names file and line."""


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
