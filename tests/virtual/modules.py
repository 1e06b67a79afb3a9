"""What the product imports of Python's library, answered by the kernel, and how it gets there.

`virtual(kernel)` puts these stand-ins in the place of the names `os`, `time`, ... in each module of
`sync` and `collectors`. A stand-in has what the product uses. Anything else raises an error that
names it, so nothing passes to the real machine in silence.
"""

from __future__ import annotations

import contextlib
import errno
import io
import mmap
import multiprocessing
import os
import pickle
import secrets
import select
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing import reduction, resource_tracker
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import collectors.rollout.shared_counters
import collectors.schedule.recording
import collectors.workers.process_lifetime
import collectors.workers.worker_loop
import sync.channel_interface
import sync.local.memory
import sync.local.waiting
import sync.model.binding
import sync.model.copying
import sync.schemes.shared_mem
from sync.local.memory import as_bytes
from sync.model.copying import copy_leaf
from tests.virtual.kernel import (
    CREDENTIALS,
    NEVER_NS,
    SIGKILL,
    EventFd,
    File,
    Kernel,
    Killed,
    Listening,
    Memory,
    PidFd,
    Process,
    Stream,
    Task,
    Words,
    readable,
)

USER = 1000
PACKAGES = ("sync", "collectors")
current: Kernel | None = None  # whose story is being run


def kernel() -> Kernel:
    if current is None:
        raise Killed
    return current


class Stand:
    """A module of the library, in so far as the product uses it.

    name: of the module. same: names that are those of the real module.
    """

    def __init__(self, module: ModuleType, same: str, **own: Any):
        self._name = module.__name__
        for name in same.split():
            setattr(self, name, getattr(module, name))
        self.__dict__.update(own)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotImplementedError(f"the virtual machine has no {self._name}.{name}")


# -- time


def monotonic_ns() -> int:
    k = kernel()
    k.now_ns += 100  # no event: nobody else is next here
    return k.now_ns


def monotonic() -> float:
    return monotonic_ns() / 1e9


# -- os


class Os(Stand):
    """`close` belongs to the process that asks for it: a finalizer may run in another one."""

    @property
    def close(self) -> Callable[[int], None]:
        process = None if current is None or current.current is None else current.process
        return Closing(process)


class Closing:
    def __init__(self, process: Process | None):
        self._process = process

    def __call__(self, fd: int) -> None:
        process = self._process
        if process is not None and not process.ended:
            process.close(fd)


def getpid() -> int:
    if current is None or current.current is None:
        return 0
    return current.process.pid


def eventfd(value: int, _flags: int) -> int:
    k = kernel()
    k.step("eventfd")
    file = EventFd(k)
    file.count = value
    return k.process.add(file)


def eventfd_write(fd: int, count: int) -> None:
    k = kernel()
    k.step("eventfd_write")
    file = k.process.file(fd)
    assert isinstance(file, EventFd)
    file.count += count


def read(fd: int, _count: int) -> bytes:
    k = kernel()
    k.step("read")
    file = k.process.file(fd)
    assert isinstance(file, EventFd)
    if not file.count:
        raise BlockingIOError(errno.EAGAIN, "empty")
    count, file.count = file.count, 0
    return count.to_bytes(8, sys.byteorder)


def memfd_create(_name: str, _flags: int) -> int:
    k = kernel()
    k.step("memfd_create")
    return k.process.add(Memory(k))


def ftruncate(fd: int, size: int) -> None:
    k = kernel()
    k.step("ftruncate")
    file = k.process.file(fd)
    assert isinstance(file, Memory)
    file.resize(size)


def fstat(fd: int) -> Any:
    k = kernel()
    k.step("fstat")
    file = k.process.file(fd)
    assert isinstance(file, Memory)
    return SimpleNamespace(st_size=file.size)


def pidfd_open(pid: int) -> int:
    k = kernel()
    k.step("pidfd_open")
    process = k.processes.get(pid)
    if process is None or process.ended:
        raise ProcessLookupError(errno.ESRCH, "no such process")
    return k.process.add(PidFd(k, process))


def waitid(_kind: int, pid: int, _options: int) -> Any:
    k = kernel()
    process = k.processes[pid]
    if process.parent is not k.process:
        raise ChildProcessError(errno.ECHILD, "no child")
    if not process.ended:
        return None
    killed = process.status < 0
    code = os.CLD_KILLED if killed else os.CLD_EXITED
    return SimpleNamespace(si_status=abs(process.status), si_code=code)


def exit_process(status: int) -> None:
    k = kernel()
    k.step("exit")
    k.end_process(k.process, status)


# -- select


class Poll:
    """`select.poll()` of a process."""

    def __init__(self) -> None:
        self._fds: dict[int, int] = {}

    def register(self, fd: Any, events: int) -> None:
        self._fds[fd if isinstance(fd, int) else fd.fileno()] = events

    def unregister(self, fd: int) -> None:
        del self._fds[fd]

    def poll(self, timeout_ms: float | None = None) -> list[tuple[int, int]]:
        k = kernel()
        k.step("poll")
        process = k.process
        ready = self._ready(process)
        if ready or timeout_ms == 0:
            return ready
        k.wait(lambda: bool(self._ready(process)), None if timeout_ms is None else timeout_ms / 1e3)
        return self._ready(process)

    def _ready(self, process: Process) -> list[tuple[int, int]]:
        ready = []
        for fd, events in self._fds.items():
            file = process.fds.get(fd)
            if file is None:
                ready.append((fd, select.POLLNVAL))
            elif events & select.POLLIN and file.is_readable():
                ready.append((fd, select.POLLIN))
            elif events & select.POLLOUT and file.is_writable():
                ready.append((fd, select.POLLOUT))
        return ready


# -- socket


class Socket:
    """A Unix socket of the process that makes it."""

    def __init__(self, _family: int = -1, _kind: int = -1, *, fileno: int | None = None):
        k = kernel()
        self._kernel, self._process = k, k.process
        self._fd = -1
        if fileno is None:
            k.step("socket")
            fileno = k.process.add(File(k))  # until it is bound or connected
        self._fd = fileno

    def fileno(self) -> int:
        return self._fd

    def setblocking(self, _flag: bool) -> None:
        """It never blocks."""

    def settimeout(self, _seconds: float) -> None:
        """A connection is made at once."""

    def detach(self) -> int:
        fd, self._fd = self._fd, -1
        return fd

    def dup(self) -> Socket:
        return Socket(fileno=self._process.add(self._file()))

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0 and not self._process.ended:
            self._process.close(fd)

    def _file(self) -> Any:
        if self._fd < 0:
            raise OSError(errno.EBADF, "the socket is closed")
        return self._process.file(self._fd)

    def _become(self, file: File) -> None:
        old, file.references = self._process.fds[self._fd], 1
        self._process.fds[self._fd] = file
        old.release()

    def bind(self, name: str) -> None:
        self._become(Listening(self._kernel, self._process.pid, name))

    def listen(self, _backlog: int) -> None:
        """It listens since it has a name."""

    def accept(self) -> tuple[Socket, str]:
        k = self._kernel
        k.step("accept")
        file = self._file()
        if not file.is_readable():
            raise BlockingIOError(errno.EAGAIN, "empty")
        fd = self._process.add(file.queue[0][1])
        file.queue.popleft()
        return Socket(fileno=fd), ""

    def connect(self, name: str) -> None:
        k = self._kernel
        k.step("connect")
        listening = k.listening.get(name)
        if listening is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "connection refused")
        near, far = k.pair(self._process.pid, listening.pid, 1 << 18)
        near.packets = far.packets = True
        at_ns = k.now_ns + k.latency_ns()
        k.times.add(at_ns)
        far.last_ns = at_ns
        listening.queue.append((at_ns, far))
        self._become(near)

    def getsockopt(self, _level: int, _name: int, _size: int) -> bytes:
        return CREDENTIALS.pack(self._file().peer_pid, USER, USER)

    def send(self, data: Any) -> int:
        return self._send(data, [])

    def _send(self, data: Any, fds: list[int]) -> int:
        self._kernel.step("send")
        file = self._file()
        files = [self._process.file(fd) for fd in fds]
        for one in files:
            one.references += 1
        try:
            count: int = file.send(bytes(data), files)
        except OSError:
            for one in files:
                one.release()
            raise
        return count

    def recv(self, most: int) -> bytes:
        return self.recv_fds(most)[0]

    def recv_fds(self, most: int) -> tuple[bytes, list[int]]:
        self._kernel.step("recv")
        data, files = self._file().receive(most)
        fds = [self._process.add(file) for file in files]
        for file in files:
            file.references -= 1
        return data, fds


def socketpair() -> tuple[Socket, Socket]:
    k = kernel()
    k.step("socketpair")
    pid = k.process.pid
    near, far = k.pair(pid, pid, k.pipe_bytes)
    return Socket(fileno=k.process.add(near)), Socket(fileno=k.process.add(far))


def send_fds(to: Socket, parts: list[bytes], fds: Any) -> int:
    return to._send(b"".join(parts), list(fds))


def recv_fds(of: Socket, most: int, _most_fds: int) -> tuple[bytes, list[int], int, None]:
    data, fds = of.recv_fds(most)
    return data, fds, 0, None


# -- mmap and words


def map_memory(fd: int, size: int, _flags: int = 0, prot: int = 3, *, offset: int = 0) -> Any:
    k = kernel()
    k.step("mmap")
    file = k.process.file(fd)
    assert isinstance(file, Memory)
    assert offset + size <= file.size, "a mapping beyond the end of its file"
    view = file.buffer[offset : offset + size]
    return view if prot & mmap.PROT_WRITE else view.toreadonly()


def watched_bytes(buffer: Any) -> Words:
    """In place of `as_bytes` where words of shared memory are read and written."""
    return Words(kernel(), as_bytes(buffer), buffer.data_ptr())


def copy_leaf_in_turns(target: Any, source: Any, **options: Any) -> bool:
    """Another process may be next before each tensor of a block is copied."""
    kernel().step("copy")
    return copy_leaf(target, source, **options)


# -- a disk


class DiskPath:
    """In place of `Path`, for a file that is added to."""

    def __init__(self, path: Any):
        self._path = Path(path)

    def absolute(self) -> DiskPath:
        return self

    def open(self, mode: str, encoding: str) -> DiskFile:
        assert (mode, encoding) == ("a", "utf-8")
        return DiskFile(self._path)


class DiskFile:
    """A file of a disk that may be full; what is written then is there in part."""

    def __init__(self, path: Path):
        kernel().step("open")
        self._path = path

    def __enter__(self) -> DiskFile:
        return self

    def __exit__(self, *exception: object) -> None:
        """Each write is on the disk at once."""

    def write(self, text: str) -> int:
        k = kernel()
        k.step("write")
        room = k.random.randrange(len(text)) if k.disk_is_full else len(text)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(text[:room])
        if room < len(text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return room


# -- threading


class Lock:
    def __init__(self) -> None:
        self._owner: Task | None = None

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        k = kernel()
        k.step("acquire")
        if self._owner is not None:
            if not blocking:
                return False
            k.wait(lambda: self._owner is None, None if timeout < 0 else timeout)
            if self._owner is not None:
                return False
        self._owner = k.current
        return True

    def release(self) -> None:
        self._owner = None

    def locked(self) -> bool:
        return self._owner is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exception: object) -> None:
        self.release()


class RLock(Lock):
    _depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._owner is not None and self._owner is kernel().current:
            self._depth += 1
            return True
        taken = super().acquire(blocking, timeout)
        self._depth = 1 if taken else self._depth
        return taken

    def release(self) -> None:
        k = kernel()
        if self._owner is not k.current:
            if k.current is None or k.process.ended:
                raise Killed
            raise RuntimeError("cannot release un-acquired lock")
        self._depth -= 1
        if not self._depth:
            self._owner = None


class Condition:
    def __init__(self, lock: Any = None) -> None:
        self._lock = RLock() if lock is None else lock
        self._waiting: deque[list[bool]] = deque()

    def acquire(self, *args: Any, **kwargs: Any) -> bool:
        taken: bool = self._lock.acquire(*args, **kwargs)
        return taken

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exception: object) -> None:
        self.release()

    def wait(self, timeout: float | None = None) -> bool:
        k, lock = kernel(), self._lock
        depth, owner = getattr(lock, "_depth", 1), lock._owner
        called = [False]
        self._waiting.append(called)
        lock._owner = None
        k.step("wait")
        if not called[0]:
            k.wait(lambda: called[0], timeout)
        if not called[0]:
            self._waiting.remove(called)
        k.wait(lambda: lock._owner is None, None)
        lock._owner = owner
        if isinstance(lock, RLock):
            lock._depth = depth
        return called[0]

    def notify(self, n: int = 1) -> None:
        for _ in range(min(n, len(self._waiting))):
            self._waiting.popleft()[0] = True

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class Event:
    def __init__(self) -> None:
        self._flag = False

    def is_set(self) -> bool:
        return self._flag

    def set(self) -> None:
        self._flag = True

    def wait(self, timeout: float | None = None) -> bool:
        kernel().step("wait")
        kernel().wait(lambda: self._flag, timeout)
        return self._flag


class Thread:
    def __init__(
        self,
        *,
        target: Callable[..., Any],
        name: str = "thread",
        args: tuple[Any, ...] = (),
        daemon: bool = False,
    ):
        self._target, self._args, self.name = target, args, name
        self._task: Task | None = None

    def start(self) -> None:
        k = kernel()
        self._task = k.start_task(k.process, lambda: self._target(*self._args), self.name)
        k.step("thread")

    def join(self, timeout: float | None = None) -> None:
        kernel().step("join")
        kernel().wait(lambda: not self.is_alive(), timeout)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.done

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Thread) and self._task is other._task

    __hash__ = None  # type: ignore[assignment]


def current_thread() -> Thread:
    thread = Thread(target=print)
    thread._task = kernel().current
    return thread


def main_thread() -> Thread:
    thread = Thread(target=print)
    thread._task = kernel().process.main
    return thread


def get_ident() -> int:
    task = kernel().current
    assert task is not None
    return task.ident


# -- signal


def pidfd_send_signal(fd: int, number: int) -> None:
    k = kernel()
    k.step("kill")
    file = k.process.file(fd)
    assert isinstance(file, PidFd)
    assert number == SIGKILL
    if file.process.ended:
        raise ProcessLookupError(errno.ESRCH, "no such process")
    k.end_process(file.process, -SIGKILL)


# -- multiprocessing


class Dup:
    """In place of `DupFd`: a descriptor for the process whose arguments are being pickled."""

    def __init__(self, fd: int):
        k = kernel()
        assert k.spawning is not None, "a descriptor is pickled outside of a start of a process"
        self._fd = k.spawning.add(k.process.file(fd))

    def detach(self) -> int:
        return self._fd


class NewProcess:
    """In place of a context's `Process`."""

    def __init__(
        self,
        *,
        target: Callable[..., Any],
        args: tuple[Any, ...] = (),
        name: str = "process",
        daemon: bool = False,
        is_child: bool = True,
    ):
        self._call, self._name, self._is_child = (target, args), name, is_child
        self._process: Process | None = None

    def start(self) -> None:
        k = kernel()
        k.step("start")
        parent = k.process if self._is_child else None  # else it is the fork server's
        process = k.new_process(self._name, parent)
        k.spawning = process
        stream = io.BytesIO()
        try:
            reduction.ForkingPickler(stream, pickle.HIGHEST_PROTOCOL).dump(self._call)
        except BaseException:
            del k.processes[process.pid]
            raise
        finally:
            k.spawning = None
        k.note(f"{process} starts")

        def main() -> None:
            function, args = pickle.loads(stream.getvalue())
            function(*args)

        self._process = process
        del self._call
        k.start_task(process, main, "main")
        k.step("started")

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def exitcode(self) -> int | None:
        process = self._process
        return None if process is None or not process.ended else process.status

    def is_alive(self) -> bool:
        return self._process is not None and not self._process.ended

    def kill(self) -> None:
        assert self._process is not None
        kernel().step("kill")
        kernel().end_process(self._process, -SIGKILL)

    def join(self, timeout: float | None = None) -> None:
        k, process = kernel(), self._process
        assert process is not None
        k.step("join")
        k.wait(lambda: process.ended, timeout)

    def close(self) -> None:
        if self.is_alive():
            raise ValueError("Cannot close a process while it is still running.")


class Context:
    """A context of multiprocessing."""

    def __init__(self, method: str):
        self.method = method

    def Process(self, **arguments: Any) -> NewProcess:
        return NewProcess(**arguments, is_child=self.method != "forkserver")

    def get_start_method(self) -> str:
        return self.method

    def set_forkserver_preload(self, _modules: list[str]) -> None:
        """All is loaded."""


def _none(*_args: Any, **_kwargs: Any) -> None:
    return None


STANDS: dict[str, Stand] = {
    "time": Stand(
        time,
        "",
        monotonic=monotonic,
        monotonic_ns=monotonic_ns,
        perf_counter=monotonic,
        perf_counter_ns=monotonic_ns,
        sleep=lambda seconds: kernel().sleep(seconds),
    ),
    "os": Os(
        os,
        "environ path EFD_NONBLOCK EFD_CLOEXEC MFD_CLOEXEC MFD_ALLOW_SEALING P_PID WEXITED "
        "WNOHANG WNOWAIT CLD_EXITED strerror cpu_count",
        getpid=getpid,
        geteuid=lambda: USER,
        eventfd=eventfd,
        eventfd_write=eventfd_write,
        read=read,
        memfd_create=memfd_create,
        ftruncate=ftruncate,
        fstat=fstat,
        pidfd_open=pidfd_open,
        waitid=waitid,
        set_inheritable=_none,
        register_at_fork=_none,
        _exit=exit_process,
    ),
    "select": Stand(select, "POLLIN POLLOUT", poll=Poll),
    "socket": Stand(
        socket,
        "AF_UNIX SOCK_SEQPACKET SOL_SOCKET SO_PEERCRED",
        socket=Socket,
        socketpair=socketpair,
        send_fds=send_fds,
        recv_fds=recv_fds,
    ),
    "mmap": Stand(mmap, "PAGESIZE PROT_READ PROT_WRITE MAP_SHARED", mmap=map_memory),
    "fcntl": SimpleNamespace(  # type: ignore[dict-item]
        fcntl=_none, F_ADD_SEALS=0, F_SEAL_SHRINK=0, F_SEAL_GROW=0
    ),
    "threading": Stand(
        threading,
        "",
        Lock=Lock,
        RLock=RLock,
        Condition=Condition,
        Event=Event,
        Thread=Thread,
        current_thread=current_thread,
        main_thread=main_thread,
        get_ident=get_ident,
    ),
    "signal": Stand(
        signal,
        "Signals SIGINT SIGTERM SIGKILL SIG_IGN SIG_DFL SIG_BLOCK SIG_UNBLOCK SIG_SETMASK",
        signal=_none,
        getsignal=_none,
        pthread_sigmask=_none,
        raise_signal=_none,
        pidfd_send_signal=pidfd_send_signal,
    ),
    "secrets": Stand(
        secrets,
        "",
        token_hex=lambda count: f"{kernel().words.getrandbits(8 * count):0{2 * count}x}",
        randbits=lambda count: kernel().words.getrandbits(count),
    ),
    "multiprocessing": Stand(
        multiprocessing,
        "",
        get_all_start_methods=lambda: ["fork", "spawn", "forkserver"],
        get_start_method=lambda allow_none=False: "forkserver",
        set_start_method=_none,
        get_context=Context,
    ),
    "resource_tracker": Stand(resource_tracker, "", ensure_running=_none),
}
REAL: dict[str, Any] = {
    "time": time,
    "os": os,
    "select": select,
    "socket": socket,
    "mmap": mmap,
    "threading": threading,
    "signal": signal,
    "secrets": secrets,
    "multiprocessing": multiprocessing,
    "resource_tracker": resource_tracker,
    "fcntl": sync.local.memory.fcntl,
    "DupFd": sync.local.memory.DupFd,
    "now_ns": time.perf_counter_ns,
}
OWN: dict[str, Any] = {**STANDS, "DupFd": Dup, "now_ns": monotonic_ns}
SINGLE: list[tuple[ModuleType, str, Any]] = [
    (collectors.rollout.shared_counters, "as_bytes", watched_bytes),
    (sync.schemes.shared_mem, "as_bytes", watched_bytes),
    (sync.model.copying, "copy_leaf", copy_leaf_in_turns),
    (sync.model.binding, "copy_leaf", copy_leaf_in_turns),
    (collectors.schedule.recording, "Path", DiskPath),
    (collectors.workers.worker_loop, "gc", SimpleNamespace(freeze=_none)),
]
# What a module of the product keeps for its process.
Kernel.own_state = [(sync.local.waiting, "_awake_s"), (sync.local.waiting, "_read_at")]


def places() -> Iterator[tuple[ModuleType, str, Any]]:
    """Each name of the product that means a part of the machine, with its stand-in."""
    for module_name, module in list(sys.modules.items()):
        if module is not None and module_name.partition(".")[0] in PACKAGES:
            for name, real in REAL.items():
                if vars(module).get(name) is real:
                    yield module, name, OWN[name]
    yield from SINGLE


@contextlib.contextmanager
def virtual(one: Kernel) -> Iterator[None]:
    """The product runs on this kernel."""
    global current
    before = [(module, name, getattr(module, name), stand) for module, name, stand in places()]
    state = [(*place, getattr(*place)) for place in Kernel.own_state]
    for module, name, _, stand in before:
        setattr(module, name, stand)
    sync.local.waiting._awake_s, sync.local.waiting._read_at = 0.0, one.now_ns / 1e9
    current = one
    try:
        yield
    finally:
        current = None
        for module, name, real, _ in before:
            setattr(module, name, real)
        for module, name, value in state:
            setattr(module, name, value)


__all__ = ["NEVER_NS", "Stream", "kernel", "readable", "virtual"]
