"""One owner each: lock files that name their holder, and Unix sockets that outlive nobody.

A lock file is held by flock, which the kernel drops when its holder dies, however it dies; the
pid in it is for the error text of whoever comes second. A socket's file stays behind when its
owner is killed; whoever holds the lock beside it knows that and takes it away.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import grp
import os
import socket
import stat
import struct
from pathlib import Path
from typing import Self

from tierd.errors import ConfigError, DaemonError, SocketBusyError

BACKLOG = 128
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


class Claim:
    """A held lock file. The file is removed when it is released."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd

    @classmethod
    def take(cls, path: Path, what: str) -> Self:
        """Take the lock.

        Args:
            path: the lock file; made if need be.
            what: for the error text, such as ``a daemon named tierd runs already``.

        Raises:
            SocketBusyError: another process holds it; the text has its pid.
            DaemonError: the file cannot be made.
        """
        while True:
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            except OSError as error:
                raise DaemonError(f"{path}: cannot be made: {error.strerror}") from None
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                holder = _read_pid(fd)
                os.close(fd)
                if error.errno not in {errno.EWOULDBLOCK, errno.EACCES}:
                    raise DaemonError(f"{path}: cannot be locked: {error.strerror}") from None
                raise SocketBusyError(f"{what}: {path} is held{_by(holder)}") from None
            # The holder before us may have removed the file between our open and our lock.
            if _is_same(fd, path):
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"{os.getpid()} {_started(os.getpid())}\n".encode(), 0)
                return cls(path, fd)
            os.close(fd)

    def release(self) -> None:
        """Remove the file, then let go of it. Idempotent."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                self.path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1


class Listener:
    """A bound, listening, non-blocking Unix socket under a lock of its own."""

    def __init__(self, path: Path, sock: socket.socket, claim: Claim) -> None:
        self.path = path
        self.sock = sock
        self._claim = claim
        self._inode = path.stat().st_ino

    @classmethod
    def open(cls, path: Path, kind: socket.SocketKind, *, mode: int, group: str = "") -> Self:
        """Bind and listen.

        Raises:
            SocketBusyError: somebody listens there already; the text has the pid.
            ConfigError: the group does not exist.
            DaemonError: the path cannot be bound.
        """
        claim = Claim.take(path.with_name(path.name + ".lock"), f"{path}: in use by a daemon")
        try:
            _clear(path)
            return cls(path, _bind(path, kind, mode, group), claim)
        except BaseException:
            claim.release()
            raise

    def close(self) -> None:
        """Stop listening and remove the socket's file, if it is still ours. Idempotent."""
        self.sock.close()
        with contextlib.suppress(OSError):
            if self.path.stat().st_ino == self._inode:
                self.path.unlink()
        self._claim.release()


def peer_pid(sock: socket.socket) -> int:
    """Return the pid of a Unix socket's peer at the time it connected or listened."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[0])


def make_directory(path: Path, key: str) -> None:
    """Make a directory and what is missing above it.

    Raises:
        DaemonError: it cannot be made or written; the text names the key that moves it.
    """
    try:
        path.mkdir(mode=0o755, parents=True, exist_ok=True)
    except OSError as error:
        text = f"{path}: cannot be made: {error.strerror}; run as root, or set {key}"
        raise DaemonError(text) from None


def _read_pid(fd: int) -> int | None:
    """Return the holder's pid, if it is the process that wrote it and not one after it."""
    words = os.pread(fd, 64, 0).split()
    if len(words) != 2 or not all(word.isdigit() for word in words):
        return None
    pid = int(words[0])
    return pid if _started(pid) == int(words[1]) else None


def _started(pid: int) -> int:
    """Return when a process started, in clock ticks since boot; 0 if there is none."""
    try:
        stat_line = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    return int(stat_line.rpartition(")")[2].split()[19])


def _by(pid: int | None) -> str:
    return "" if pid is None else f" by pid {pid}; run: kill {pid}"


def _is_same(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _clear(path: Path) -> None:
    """Remove a dead owner's socket; refuse what is no socket, or is alive after all."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise DaemonError(f"{path}: is not a socket; move it away or choose another path")
    except FileNotFoundError:
        return
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
        with socket.socket(socket.AF_UNIX, kind) as probe:
            probe.settimeout(1.0)  # its backlog may be full
            try:
                probe.connect(os.fspath(path))
            except OSError as error:
                if error.errno not in {errno.ECONNREFUSED, errno.EPROTOTYPE, errno.ENOENT}:
                    text = f"{path}: cannot be examined: {error.strerror}"
                    raise DaemonError(text) from None
            else:
                pid = peer_pid(probe)
                raise SocketBusyError(f"{path}: in use{_by(pid)}")
    path.unlink(missing_ok=True)


def _bind(path: Path, kind: socket.SocketKind, mode: int, group: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, kind | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    # Nobody may connect before the permissions are what was asked for.
    mask = os.umask(0o177)
    try:
        sock.bind(os.fspath(path))
    except OSError as error:
        sock.close()
        raise DaemonError(f"{path}: cannot be bound: {error.strerror}") from None
    finally:
        os.umask(mask)
    try:
        if group:
            os.chown(path, -1, _group_id(group))
        path.chmod(mode)
        sock.listen(BACKLOG)
    except BaseException as error:
        sock.close()
        path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            text = f"{path}: group {group or '-'} and mode {mode:o} cannot be set: {error.strerror}"
            raise DaemonError(text) from None
        raise
    return sock


def _group_id(name: str) -> int:
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise ConfigError(f"engine.socket_group: there is no group {name}") from None
