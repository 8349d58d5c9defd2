"""The ZeroMQ sockets of the wire, with their options, and the private directory that holds their files.

Owns which options are set, how a message is sent and received without blocking, and who may use a run directory.
Refuses to look into a message, and every transport but `ipc://`: nothing here authenticates a peer, the directory's
mode does.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import os
import secrets
import stat
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import zmq
from typing_extensions import Buffer

from shared.errors import ConfigurationError
from shared.frames import frame_bytes
from shared.messages import FRAME_BYTES_MAX
from shared.processes import described

__all__ = [
    "Buffer", "RunDirectory", "bind_again", "bind_router", "connect_dealer", "drain", "fresh_routing_id", "receive",
    "send",
]  # fmt: skip

FRONT_SOCKET = "front.sock"
MODEL_SOCKET = "model.sock"
LOCK_FILE = "lock"

# `sockaddr_un.sun_path` has 108 bytes, the last of which is the terminating NUL. A longer path cannot be bound.
SOCKET_PATH_BYTES_MAX = 107
# How long closing a socket waits for what was sent to leave. A local peer that reads takes it at once; one that does
# not must not hold up an exit.
LINGER_MS = 1000
# From here on a frame is handed to ZeroMQ by reference. Below, copying is cheaper than counting references; this is
# also pyzmq's own threshold.
ZERO_COPY_BYTES_MIN = 64 * 1024

# Plain numbers: combining flags of an enumeration for each frame costs as much as sending it.
_NOBLOCK = int(zmq.NOBLOCK)
_NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS = int(zmq.EVENTS)
_READABLE = int(zmq.POLLIN)
_WRITABLE = int(zmq.POLLOUT)
# The process that first used each context; see `_claim`.
_owner_pids: weakref.WeakKeyDictionary[zmq.Context[Any], int] = weakref.WeakKeyDictionary()


class RunDirectory:
    """The directory of one instance: its two socket files, and the lock that keeps a second instance out.

    The model server calls `prepare`, `lock` and `clean`, in this order and before it binds, and `release` at its end.
    Everybody else only asks for the endpoints. A process that has made the directory removes it at its exit, unless
    somebody has begun to use it: a start that was refused leaves nothing behind.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self._locks: list[int] = []

    @property
    def front_endpoint(self) -> str:
        """Where the model server listens for front workers.

        Raises:
            ConfigurationError: the path is too long for a socket.
        """
        return self._endpoint(FRONT_SOCKET)

    @property
    def model_endpoint(self) -> str:
        """Where the model server listens for model processes.

        Raises:
            ConfigurationError: the path is too long for a socket.
        """
        return self._endpoint(MODEL_SOCKET)

    def prepare(self) -> None:
        """Makes the directory, for this user only, or checks the one that is there.

        Raises:
            ConfigurationError: the path is too long, not a directory, not ours, open to others or not writable.
        """
        for name in (FRONT_SOCKET, MODEL_SOCKET):
            self._endpoint(name)
        try:
            _make_private(self.path)
            found = self.path.lstat()
        except OSError as error:
            raise ConfigurationError(
                f"run directory {self.path} cannot be made: {error.strerror}; set run_dir to a path you can write to"
            ) from None
        if not stat.S_ISDIR(found.st_mode):
            raise ConfigurationError(f"run directory {self.path} is not a directory; set run_dir to another path")
        if found.st_uid != os.geteuid():
            raise ConfigurationError(
                f"run directory {self.path} belongs to user {found.st_uid}, not to {os.geteuid()} who runs this; "
                "set run_dir to a path of your own"
            )
        if found.st_mode & 0o077:
            # What everybody may write to, such as /tmp, is shared on purpose.
            remedy = "set run_dir to a directory of your own"
            if not found.st_mode & stat.S_IWOTH:
                remedy = f"chmod 700 {self.path}, or {remedy}"
            raise ConfigurationError(
                f"run directory {self.path} is open to other users (mode {stat.S_IMODE(found.st_mode):04o}), and who "
                f"can reach its sockets can use the models: {remedy}"
            )
        _check_parent(self.path)
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise ConfigurationError(f"run directory {self.path} is not writable; set run_dir to a path that is")

    def lock(self) -> None:
        """Keeps every other instance out until `release`, or until this process ends in whatever way.

        Binding a live `ipc://` path raises nothing and silently takes the socket away from the process that had it,
        so this lock is the only thing between two instances.

        Raises:
            ConfigurationError: another process holds the directory; its pid is named.
        """
        lock_file = self.path / LOCK_FILE
        # The directory is locked as well: cleaners of temporary directories delete old files, but pass over a locked
        # directory; and if the file is deleted all the same, the directory still keeps a second instance out.
        if not self.path.exists():
            # Whoever had made it has just left, with nothing in it.
            self.prepare()
        for target, flags in _what_to_lock(self.path):
            try:
                self._locks.append(os.open(target, flags, 0o600))
            except OSError as error:
                self._unlock()
                raise ConfigurationError(
                    f"{target} cannot be opened: {error.strerror}; check its owner and mode"
                ) from None
            try:
                fcntl.flock(self._locks[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = _holder(lock_file)
                self._unlock()
                raise ConfigurationError(
                    f"run directory {self.path} is in use by {holder}: stop that first, or set HEADWAITER_NAME, or "
                    "HEADWAITER_RUN_DIR where run_dir is set, to another one for this instance"
                ) from None
        # Over what a killed holder has left, which has its space: the disk may be full.
        holder_line = f"{os.getpid()}\n".encode()
        try:
            os.pwrite(self._locks[0], holder_line, 0)
            os.ftruncate(self._locks[0], len(holder_line))
        except OSError as error:
            self._unlock()
            raise ConfigurationError(f"{lock_file} cannot be written: {error.strerror}; check run_dir") from None

    def clean(self) -> None:
        """Removes the socket files that a killed instance left behind. Only the holder of the lock may."""
        assert self._locks, "only the holder of the lock may remove socket files"
        for name in (FRONT_SOCKET, MODEL_SOCKET):
            (self.path / name).unlink(missing_ok=True)

    @property
    def has_server(self) -> bool:
        """Whether a model server listens for fronts here; or did, until it was killed."""
        return (self.path / FRONT_SOCKET).exists()

    @property
    def is_intact(self) -> bool:
        """Whether both sockets can be found by those who want to connect. Only while both are bound."""
        return all((self.path / name).exists() for name in (FRONT_SOCKET, MODEL_SOCKET))

    def restore(self) -> None:
        """Makes the directory and takes the lock again, after somebody has deleted them; the sockets can be bound then.

        Raises:
            ConfigurationError: it cannot be made, or another instance has taken the place; the lock is not held then.
        """
        self._unlock()
        self.prepare()
        self.lock()
        self.clean()

    def release(self) -> None:
        """Removes the socket files and lets the next instance in. Does nothing without the lock.

        The lock file stays: removing it would let two processes lock two files of the same name.
        """
        if self._locks:
            self.clean()
            os.ftruncate(self._locks[0], 0)
            self._unlock()

    def _unlock(self) -> None:
        while self._locks:
            os.close(self._locks.pop())

    def _endpoint(self, name: str) -> str:
        path = self.path / name
        length_bytes = len(os.fsencode(path))
        if length_bytes > SOCKET_PATH_BYTES_MAX:
            raise ConfigurationError(
                f"{path} has {length_bytes} bytes and a socket's path may have {SOCKET_PATH_BYTES_MAX}: "
                f"set run_dir to a path of at most {SOCKET_PATH_BYTES_MAX - len(name) - 1} bytes"
            )
        return f"ipc://{path}"


def bind_router(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    """A listening ROUTER. A message to a peer that is not connected is refused (`send` returns False), not dropped.

    Raises:
        ConfigurationError: the endpoint cannot be bound; the message says why.
    """
    socket = _socket(context, zmq.ROUTER, endpoint)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise ConfigurationError(f"cannot listen at {endpoint}: {error.strerror}; check run_dir") from None
    _keep_others_out(endpoint)
    return socket


def bind_again(socket: zmq.Socket[bytes], endpoint: str) -> None:
    """Listens at the same endpoint once more, where the socket's file was deleted; connections go on undisturbed.

    The old listener stays, out of reach: ZeroMQ would end its connections with it.

    Raises:
        ConfigurationError: the endpoint cannot be bound; the message says why.
    """
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise ConfigurationError(f"cannot listen at {endpoint}: {error.strerror}; check run_dir") from None
    _keep_others_out(endpoint)


def connect_dealer(
    context: zmq.Context[zmq.Socket[bytes]],
    endpoint: str,
    routing_id: bytes | None = None,
    *,
    hold_unsent: bool = True,
) -> zmq.Socket[bytes]:
    """A DEALER that connects to `endpoint` now or as soon as somebody listens there, and again after every loss.

    `routing_id` defaults to a fresh one. With `hold_unsent`, what is sent while nobody listens waits, without limit,
    and goes out on the next connection. Without, `send` returns False then, and what had not left when a connection
    ended is dropped: for a sender that keeps its requests itself and must not have old ones reach a new server.

    Raises:
        ConfigurationError: the endpoint is none that ZeroMQ can connect to.
    """
    socket = _socket(context, zmq.DEALER, endpoint)
    socket.setsockopt(zmq.ROUTING_ID, routing_id or fresh_routing_id())
    socket.setsockopt(zmq.IMMEDIATE, 0 if hold_unsent else 1)
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise ConfigurationError(f"cannot connect to {endpoint}: {error.strerror}; check run_dir") from None
    return socket


def fresh_routing_id() -> bytes:
    """16 bytes that no connection ever had. The first one is not zero: ZeroMQ keeps those for itself."""
    return b"\x01" + secrets.token_bytes(15)


def send(socket: zmq.Socket[bytes], parts: Sequence[Buffer]) -> bool:
    """Sends one message without waiting; False if the peer is not connected.

    Frames of 64 KiB and more go by reference: what they view must never be written to again.

    Raises:
        zmq.ZMQError: anything else; the socket is closed, or a bug.
    """
    last = len(parts) - 1
    # All made before the first is sent: what cannot be made would leave half a message behind, and the next one would
    # be taken for its other half.
    frames = [_frame(part) for part in parts]
    try:
        for position, frame in enumerate(frames):
            # A frame that was received from another socket is relayed by reference, whatever its size.
            socket.send(frame, _NOBLOCK if position == last else _NOBLOCK_MORE, copy=not isinstance(frame, zmq.Frame))
    except zmq.ZMQError as error:
        # EHOSTUNREACH: a ROUTER does not know the peer. EAGAIN: a DEALER has no connection; queues are never full,
        # because they have no high-water mark. Both happen at the first frame, so no half message is ever sent.
        if error.errno in (errno.EHOSTUNREACH, zmq.EAGAIN):
            return False
        raise
    return True


def receive(socket: zmq.Socket[bytes]) -> list[Buffer] | None:
    """The next message's frames, or None if there is none. Never blocks and never copies.

    The frames own their memory; what is made from them (views, arrays) keeps it alive.
    """
    try:
        frame = socket.recv(_NOBLOCK, copy=False)
    except zmq.Again:
        return None
    frames = [frame]
    while frame.more:
        frame = socket.recv(_NOBLOCK, copy=False)
        frames.append(frame)
    # A `zmq.Frame` is a buffer, which pyzmq's annotations do not say.
    return cast(list[Buffer], frames)


def has_message(socket: zmq.Socket[bytes]) -> bool:
    """Whether `receive` would return one.

    A socket's file descriptor signals changes only, and any use of the socket, a send as well, may take a change in.
    So whoever waits for the file descriptor asks this first, after everything else that was done with the socket.
    """
    return readiness(socket)[0]


def readiness(socket: zmq.Socket[bytes]) -> tuple[bool, bool]:
    """Whether `receive` would return a message; and whether a DEALER that holds nothing unsent has a connection.

    In one answer: to ask a second time would take in what has changed since the first.
    """
    events = int(socket.getsockopt(_EVENTS))
    return bool(events & _READABLE), bool(events & _WRITABLE)


def drain(socket: zmq.Socket[bytes], messages_max: int) -> Iterator[list[Buffer]]:
    """What has arrived, at most `messages_max` messages, so that a busy peer cannot keep a loop from its other work.

    Whoever stops at `messages_max` finds the rest by `has_message`.
    """
    for _ in range(messages_max):
        parts = receive(socket)
        if parts is None:
            return
        yield parts
        # A receive in vain ends in an exception, which costs more than to ask.
        if not has_message(socket):
            return


def _frame(part: Buffer) -> Buffer:
    """What to send for a part: small ones as they are, to be copied, large ones as a frame that refers to them."""
    if isinstance(part, zmq.Frame) or frame_bytes(part) < ZERO_COPY_BYTES_MIN:
        return part
    return cast(Buffer, zmq.Frame(part, copy=False))


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int, endpoint: str) -> zmq.Socket[bytes]:
    if not endpoint.startswith("ipc://"):
        raise ConfigurationError(
            f"endpoint {endpoint!r} is not ipc://: peers are not authenticated, so sockets stay local"
        )
    _claim(context)
    socket = context.socket(kind)
    # No high-water mark: a full queue would block or drop. Requests are counted and bounded at admission instead.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    # A peer that announces a larger frame is disconnected before any memory is taken for it.
    socket.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES_MAX)
    return socket


def _keep_others_out(endpoint: str) -> None:
    """The directory keeps them out already; this does so too if somebody opens it."""
    os.chmod(endpoint.removeprefix("ipc://"), 0o600)


def _claim(context: zmq.Context[Any]) -> None:
    """A context that was used before a fork has no threads in the child: its sockets hang, or end the process."""
    owner = _owner_pids.setdefault(context, os.getpid())
    if owner != os.getpid():
        raise RuntimeError(
            f"this ZeroMQ context was first used by process {owner} and inherited by fork: make a new one in process "
            f"{os.getpid()}"
        )


def _make_private(path: Path) -> None:
    """Makes what is missing of `path`, each directory with mode 0700 (`mkdir(parents=True)` opens the parents)."""
    if not path.parent.exists():
        _make_private(path.parent)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        return
    atexit.register(_remove_unused, path, os.getpid())


def _remove_unused(path: Path, maker_pid: int) -> None:
    """Removes a directory that holds nothing, or nothing but a lock file that nobody has locked; inner ones come before
    outer ones, because what is registered last is called first."""
    if os.getpid() != maker_pid:
        return  # a child that was forked
    with contextlib.suppress(OSError), contextlib.ExitStack() as cleanup:
        if os.listdir(path) == [LOCK_FILE]:
            for target, flags in _what_to_lock(path):
                descriptor = os.open(target, flags)
                cleanup.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (path / LOCK_FILE).unlink()
        path.rmdir()


def _what_to_lock(directory: Path) -> Iterator[tuple[Path, int]]:
    """The lock file, which is made if it is missing, and the directory itself; with the flags to open each."""
    yield directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    yield directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def _check_parent(path: Path) -> None:
    """Whoever can rename entries of the parent can put a directory of their own in our place."""
    parent = path.parent.stat()
    if parent.st_uid not in (0, os.geteuid()):
        raise ConfigurationError(
            f"{path.parent} belongs to user {parent.st_uid}, who could replace the run directory {path}; "
            "set run_dir to a path whose parent is yours"
        )
    if parent.st_mode & stat.S_IWOTH and not parent.st_mode & stat.S_ISVTX:
        raise ConfigurationError(
            f"{path.parent} is writable for everybody, who could replace the run directory {path}: "
            f"chmod o-w {path.parent}, or set run_dir to another path"
        )


def _holder(lock_file: Path) -> str:
    # The holder writes its pid a moment after taking the lock; and one that leaves for good takes the file away.
    pid = lock_file.read_text().strip() if lock_file.exists() else ""
    return described(int(pid)) if pid.isdecimal() else "another process"
