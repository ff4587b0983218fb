"""One error class per mistake a user can make; each message is one line.

A message says what happened, where (path, device, value), why that is likely and, after "; run:",
the command that mends or shows it. The CLI prints the line and exits with ``exit_code``.
Programming faults are not here: they are ordinary exceptions and stop the process.
"""

from __future__ import annotations


class TierdError(Exception):
    """Base of every error that is meant for a user."""

    exit_code = 1


class ConfigError(TierdError):
    """A configuration file or value that cannot be used."""


class CheckpointError(TierdError):
    """A checkpoint that cannot be imported as it is."""


class ShardLengthError(CheckpointError):
    """A safetensors shard is shorter or longer than its header says."""


class ShardMissingError(CheckpointError):
    """A shard that the index names does not exist."""


class HeaderError(CheckpointError):
    """A safetensors header that is cut off, oversized or not valid JSON."""


class TensorMissingError(CheckpointError):
    """The index names a tensor that its shard does not hold."""


class NoTableError(CheckpointError):
    """No tensor of the checkpoint matches, or only a part of a table does."""


class TensorShapeError(CheckpointError):
    """A tensor's dtype or shape is not the one its table kind has."""


class PayloadError(CheckpointError):
    """A value that the row format forbids: a NaN payload or a scale of 255."""


class UnsupportedTableError(CheckpointError):
    """A table format that tierd knows by name and does not serve."""


class DeviceError(TierdError):
    """A device that cannot be used as asked."""


class DeviceBusyError(DeviceError):
    """Another process holds the device."""


class NoDeviceError(DeviceError):
    """The daemon does not have this device."""


class DeviceForeignError(DeviceError):
    """The device holds something that tierd did not write."""


class DeviceTooSmallError(DeviceError):
    """The device has less room than the image needs."""


class DeviceDamagedError(DeviceError):
    """Neither root of the device, or not its extent table, can be read."""


class DeviceVersionError(DeviceError):
    """The device was written by a newer tierd."""


class DeviceShrunkError(DeviceError):
    """The device has fewer bytes than when it was formatted."""


class DeviceReadOnlyError(DeviceError):
    """The device, or the file system below it, takes no writes."""


class DeviceMissingError(DeviceError):
    """There is no such device: the path leads nowhere, or no device has the UUID."""


class DeviceDuplicateError(DeviceError):
    """Two devices bear the same UUID: one is a copy of the other."""


class DeviceFailedError(DeviceError):
    """The device failed a read, a write or a flush, or does not store what it is told."""


class RdmaError(TierdError):
    """Reading from another node's memory does not work as asked."""


class RdmaMissingError(RdmaError):
    """No RDMA on this machine: no library, no kernel support or no device."""


class RdmaPermissionError(RdmaError):
    """The RDMA device cannot be opened by this user."""


class RdmaPortError(RdmaError):
    """No port of the RDMA device can be used."""


class RdmaMemoryError(RdmaError):
    """Memory could not be registered: the limit on locked memory, or not enough of it."""


class DramError(TierdError):
    """An image has no place in this node's memory."""


class RdmaPeerError(RdmaError):
    """The peer cannot be read from: refused, gone, of another version, or nothing fits."""


class PeerSilentError(RdmaPeerError):
    """The peer's REST interface does not answer now; its memory may be readable all the same."""


class ImageError(TierdError):
    """An image that does not exist, is incomplete or does not match."""


class ImageIncompleteError(ImageError):
    """A device that holds a part of the image is not there, or lost that part."""


class ImageVersionError(ImageError):
    """The image's pages have a newer format than this tierd reads."""


class VerifyError(ImageError):
    """Verification found a page or a row that is not what was imported."""


class DaemonError(TierdError):
    """The daemon cannot start, or cannot be reached."""


class SocketBusyError(DaemonError):
    """Another daemon listens on the socket."""


class NoDaemonError(DaemonError):
    """Nobody listens where a daemon was looked for."""


class RestError(DaemonError):
    """The daemon refused what was asked over REST; the text is its own."""


class NoClientError(DaemonError):
    """No client of this id is attached."""


class NoJobError(DaemonError):
    """The daemon knows no job of this id."""


class JobError(DaemonError):
    """The daemon takes no more jobs now."""


class JobFailedError(DaemonError):
    """A job of the daemon failed or was cancelled; the text is the daemon's."""


class JobCancelledError(DaemonError):
    """Somebody cancelled the job."""


class AttachError(DaemonError):
    """The daemon refused a client, or the two do not fit each other."""


class DaemonGoneError(AttachError):
    """The daemon went away in the middle of a conversation; there may be another one soon."""


class HookError(TierdError):
    """The engine hook cannot serve this engine or model, and refuses to."""


class WindowsMissingError(TierdError):
    """No probe measured a window, or a device's read time, that a decision needs."""


class WindowsForeignError(TierdError):
    """Windows that were measured on another GPU, engine version or model."""


class CurveError(TierdError):
    """A miss curve that cannot be one."""


class QuotaError(TierdError):
    """Quotas that do not fit the ways of a cache, or a cache that does not fit memory."""


class PlacementError(TierdError):
    """No tier takes a table in time and in the room there is."""


class TraceError(TierdError):
    """A trace that cannot be read or written."""


class SeenSetError(TraceError):
    """A seen-set that cannot be read, or is of another table than is served."""


class TraceModelError(TraceError):
    """A trace of another model than the one in question."""


class RowError(TierdError):
    """A request failed: its rows could not be read or did not pass their checks."""


class KvUnsupportedError(HookError):
    """A model or KV cache that OasisKV does not serve, by name."""


class KvPoolError(TierdError):
    """A host pool that cannot be made, leased or trusted."""


class KvPoolFullError(KvPoolError):
    """The host pool has no room for a request now; it waits or is preempted."""
