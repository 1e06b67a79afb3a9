"""A virtual machine for the processes of one run: its clock, processes, descriptors and memory.

The code under test is the real one: collectors, pools, handles, the worker loop, senders, receivers
and channels run unchanged. What they ask of Python's `os`, `socket`, `select`, `time`, `threading`,
`signal`, `mmap` and `multiprocessing` is answered here (`modules.py` puts it in their place).

    a product's call           what happens here
    ------------------------   ---------------------------------------------------------------
    poll, recv, send, close    on sockets, eventfds, pidfds of this kernel; numbers as on Linux
    mmap, a word of the board  real memory, one copy, which all virtual processes see
    time.monotonic, sleep      the virtual clock; nothing ever waits for real
    Process.start()            the arguments are pickled; a thread runs `target` on the copy
    SIGKILL                    the threads of the process never go on; its descriptors close

Each virtual process is one thread or several. Only the thread that has the baton runs. It may pass
the baton on at each call above (an event), and has to where it waits. Who is next is drawn from the
seed, so one seed is one story, to the event. If all wait, the clock jumps to what comes first.

Words of shared memory (`Words`) have the store buffers of a processor: a store becomes visible to
other processes later, in order, at the latest with the next system call. So a missing fence shows.

What it does not hold: other reorderings of memory accesses, a preemption inside a kernel of torch
or numpy, write protection of pages (SIGSEGV), the fork server, signals other than SIGKILL and
SIGSTOP, and global state of the interpreter, which processes share here: the global random streams,
`os.environ`, torch's settings. `own_state` names what is kept for each process all the same.
"""

from __future__ import annotations

import _thread
import contextlib
import errno
import heapq
import mmap
import os
import random
import struct
import sys
import threading
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, ClassVar

NEVER_NS = 1 << 62
MS = 1_000_000
S = 1_000_000_000
FIRST_PID = 100
FIRST_FD = 3
SIGKILL = 9
REAL_S, MOST_STILL = 5.0, 12  # how often it is looked whether a story goes on
NO_CALLS = ("load", "store", "copy", "use", "fill")  # events that are no system calls
SLOW = 0.02  # the weight of a process that is seldom next


class Killed(BaseException):
    """Ends the threads of a process that is gone. Nothing that they do after it has an effect."""


class Task:
    """A thread of a virtual process. It runs while it has the baton."""

    def __init__(self, process: Process, function: Callable[[], object], name: str, ident: int):
        self.process = process
        self.function = function
        self.name = name
        self.ident = ident
        self.ready: Callable[[], bool] | None = None  # what it waits for
        self.deadline_ns = NEVER_NS
        self.baton = _thread.allocate_lock()
        self.baton.acquire()
        self.reaper: Any = None  # who waits for its end
        self.done = False

    def __str__(self) -> str:
        return str(self.process) if self is self.process.main else f"{self.process}/{self.name}"

    def is_ready(self, now_ns: int) -> bool:
        if self.process.stopped_until_ns > now_ns:
            return False
        return self.ready is None or self.deadline_ns <= now_ns or self.ready()


class Process:
    """A virtual process: descriptors, threads, and what it has stored but nobody sees yet."""

    def __init__(self, pid: int, name: str, parent: Process | None):
        self.pid = pid
        self.name = name
        self.parent = parent
        self.main: Task | None = None
        self.fds: dict[int, File] = {}
        self.most_fds = 1 << 20  # how many descriptors it may have
        self.weight = 1.0  # how likely it is next
        self.ended = False
        self.status = 0  # as `Process.exitcode`
        self.error: BaseException | None = None  # that its main thread raised
        self.stopped_until_ns = 0
        self.stores: deque[tuple[Any, int, int, int]] = deque()  # view, index, address, value
        self.own_state: dict[tuple[ModuleType, str], Any] = {}

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})"

    def add(self, file: File) -> int:
        """The number of a new descriptor, the lowest that is free."""
        if len(self.fds) >= self.most_fds:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        number = FIRST_FD
        while number in self.fds:
            number += 1
        self.fds[number] = file
        file.references += 1
        return number

    def file(self, number: int) -> File:
        if number not in self.fds:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return self.fds[number]

    def close(self, number: int) -> None:
        file = self.fds.pop(number, None)
        if file is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        file.release()


class File:
    """What a descriptor stands for."""

    def __init__(self, kernel: Kernel):
        self.kernel = kernel
        self.references = 0

    def is_readable(self) -> bool:
        return False

    def is_writable(self) -> bool:
        return True

    def release(self) -> None:
        self.references -= 1
        if not self.references:
            self.ended()

    def ended(self) -> None:
        """The last descriptor is closed."""


class EventFd(File):
    """A counter that is readable while it is not zero."""

    count = 0

    def is_readable(self) -> bool:
        return self.count > 0


class PidFd(File):
    """A descriptor of a process; readable once that has ended."""

    def __init__(self, kernel: Kernel, process: Process):
        super().__init__(kernel)
        self.process = process

    def is_readable(self) -> bool:
        return self.process.ended


class Memory(File):
    """An unnamed file in memory."""

    buffer: Any = None
    size = 0

    def resize(self, size: int) -> None:
        self.size = size
        self.buffer = memoryview(mmap.mmap(-1, size)) if size else None


class Stream(File):
    """One end of a connection: bytes, and descriptors that travel with them, in order.

    packets: whether what is sent at once is received at once.
    """

    def __init__(self, kernel: Kernel, pid: int, capacity: int):
        super().__init__(kernel)
        self.packets = False
        self.peer: Stream | None = None
        self.peer_pid = 0
        self.pid = pid
        self.capacity = capacity
        self.inbox: deque[tuple[int, bytes, list[File]]] = deque()  # with the time of arrival
        self.inbox_bytes = 0
        self.last_ns = 0
        self.closed = self.reset = False
        self.end_ns = NEVER_NS  # when the end of the stream arrives

    def join(self, peer: Stream) -> None:
        self.peer, peer.peer = peer, self
        self.peer_pid, peer.peer_pid = peer.pid, self.pid

    def is_readable(self) -> bool:
        now_ns = self.kernel.now_ns
        return bool(self.inbox and self.inbox[0][0] <= now_ns) or self.end_ns <= now_ns

    def is_writable(self) -> bool:
        peer = self.peer
        return peer is None or peer.closed or peer.inbox_bytes < peer.capacity

    def send(self, data: bytes, files: list[File]) -> int:
        peer = self.peer
        if self.reset:
            raise ConnectionResetError(errno.ECONNRESET, "reset")
        if peer is None or peer.closed:
            raise BrokenPipeError(errno.EPIPE, "broken pipe")
        room = peer.capacity - peer.inbox_bytes
        if room <= 0 or (self.packets and room < len(data)):
            raise BlockingIOError(errno.EAGAIN, "full")
        data = data[:room]
        peer.last_ns = max(peer.last_ns, self.kernel.now_ns + self.kernel.latency_ns())
        self.kernel.times.add(peer.last_ns)
        peer.inbox.append((peer.last_ns, data, files))
        peer.inbox_bytes += len(data)
        return len(data)

    def receive(self, most: int) -> tuple[bytes, list[File]]:
        if self.packets and self.reset and self.end_ns <= self.kernel.now_ns:
            self.reset = False  # as Linux does: before what had arrived
            raise ConnectionResetError(errno.ECONNRESET, "reset")
        if not (self.inbox and self.inbox[0][0] <= self.kernel.now_ns):
            if self.inbox or self.end_ns > self.kernel.now_ns:
                raise BlockingIOError(errno.EAGAIN, "empty")
            if self.reset:
                self.reset = False
                raise ConnectionResetError(errno.ECONNRESET, "reset")
            return b"", []
        at_ns, data, files = self.inbox.popleft()
        count = min(most, len(data))
        if count > 1 and not self.packets and self.kernel.splits():
            count = self.kernel.random.randrange(1, count)
        if count < len(data):
            self.inbox.appendleft((at_ns, data[count:], []))
        self.inbox_bytes -= count
        return data[:count], files

    def ended(self) -> None:
        self.closed = True
        peer = self.peer
        if peer is not None and not peer.closed:
            peer.reset = bool(self.inbox)  # as Linux does
            peer.end_ns = max(peer.last_ns, self.kernel.now_ns + self.kernel.latency_ns())
            self.kernel.times.add(peer.end_ns)
        self.inbox.clear()


class Listening(File):
    """A socket to which others connect by its name."""

    def __init__(self, kernel: Kernel, pid: int, name: str):
        super().__init__(kernel)
        self.pid = pid
        self.name = name
        self.queue: deque[tuple[int, Stream]] = deque()
        kernel.listening[name] = self

    def is_readable(self) -> bool:
        return bool(self.queue and self.queue[0][0] <= self.kernel.now_ns)

    def ended(self) -> None:
        self.kernel.listening.pop(self.name, None)
        for _, stream in self.queue:
            stream.ended()
        self.queue.clear()


class Times:
    """Moments at which something arrives: the clock stops there."""

    def __init__(self) -> None:
        self._heap: list[int] = []

    def add(self, at_ns: int) -> None:
        heapq.heappush(self._heap, at_ns)

    def after(self, now_ns: int) -> int:
        while self._heap and self._heap[0] <= now_ns:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else NEVER_NS


class Words:
    """64-bit words of shared memory, each access of which is an event."""

    def __init__(self, kernel: Kernel, view: memoryview, address: int):
        self._kernel, self._view, self._address = kernel, view, address

    def cast(self, _format: str) -> Words:
        return Words(self._kernel, self._view.cast("q"), self._address)

    def __len__(self) -> int:
        return len(self._view)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            start, _, _ = index.indices(len(self._view))
            return Words(self._kernel, self._view[index], self._address + 8 * start)
        self._kernel.step("load")
        address = self._address + 8 * index
        for _, _, at, value in reversed(self._kernel.process.stores):
            if at == address:
                return value
        return self._view[index]

    def __setitem__(self, index: int, value: int) -> None:
        kernel = self._kernel
        kernel.step("store")
        address = self._address + 8 * index
        kernel.process.stores.append((self._view, index, address, int(value)))
        if not kernel.has_store_buffers:
            kernel.drain(kernel.process)


class Kernel:
    """One story: all processes, and whose turn it is.

    switch: how likely another thread is next after an event that does not wait.
    late_ns: the most that a message takes. split: how likely a read returns only a part.
    pipe_bytes: how much a socketpair holds.
    slow: how likely a process is one that is seldom next, so that others do much meanwhile.
    on_event: called at each event that is due by `next_strike`, with the number of the event.
    """

    own_state: ClassVar[list[tuple[ModuleType, str]]] = []  # globals that each process has anew

    def __init__(
        self,
        seed: int,
        *,
        switch: float = 0.1,
        event_ns: int = 10_000,
        late_ns: int = 0,
        late: float = 0.0,
        split: float = 0.0,
        pipe_bytes: int = 1 << 18,
        has_store_buffers: bool = True,
        slow: float = 0.0,
        most_events: int = 60_000,
        most_s: float = 3600.0,
        verbose: bool = False,
    ):
        self.random = random.Random(seed)
        self.words = random.Random(seed + 1)  # for secrets
        self.switch, self.event_ns = switch, event_ns
        self.late_ns, self.late, self.split = late_ns, late, split
        self.pipe_bytes = pipe_bytes
        self.slow = slow
        self.has_store_buffers = has_store_buffers
        self.most_events, self.most_ns = most_events, int(most_s * S)
        self.now_ns = S
        self.events = 0
        self.next_strike = NEVER_NS
        self.on_event: Callable[[int], None] = lambda number: None
        self.times = Times()
        self.tasks: list[Task] = []
        self.processes: dict[int, Process] = {}
        self.listening: dict[str, Listening] = {}
        self.current: Task | None = None
        self.spawning: Process | None = None  # a process whose arguments are being pickled
        self.disk_is_full = False
        self.overrun = ""  # why the story was ended by force
        self.digest = 0
        self.verbose = verbose
        self.log: list[str] = []
        self._finished = _thread.allocate_lock()
        self._finished.acquire()
        self._idents = 0
        self._over = False

    # -- running

    @property
    def process(self) -> Process:
        if self.current is None:
            raise Killed
        return self.current.process

    def note(self, text: str) -> None:
        """Something that a person wants to read of the story."""
        self.log.append(f"{self.events:7d} {self.now_ns / S:12.6f} s  {text}")

    def run(self, function: Callable[[], object], name: str = "trainer") -> Process:
        """Run a first process until it and all others have ended; returns it."""
        hook, sys.unraisablehook = sys.unraisablehook, _quiet_hook(sys.unraisablehook)
        first = self.new_process(name, None)
        try:
            self.start_task(first, function, "main")
            self.current = self._next()
            assert self.current is not None
            self.current.baton.release()
            self._await_end()
        finally:
            self.current = None
            sys.unraisablehook = hook
        return first

    def _await_end(self) -> None:
        """Raise if nothing happens for long: something waits for real."""
        events, still = -1, 0
        while not self._finished.acquire(timeout=REAL_S):
            still = still + 1 if self.events == events else 0
            events = self.events
            if still > MOST_STILL:
                raise RuntimeError(f"the story hangs for real: {self.log[-5:]}")

    def new_process(self, name: str, parent: Process | None) -> Process:
        pid = FIRST_PID + len(self.processes)
        process = self.processes[pid] = Process(pid, name, parent)
        if self.slow and self.random.random() < self.slow:
            process.weight = SLOW
        return process

    def start_task(self, process: Process, function: Callable[[], object], name: str) -> Task:
        self._idents += 1
        task = Task(process, function, name, self._idents)
        if process.main is None:
            process.main = task
        self.tasks.append(task)
        threading.Thread(target=self._run_task, args=(task,), name=name, daemon=True).start()
        return task

    def _run_task(self, task: Task) -> None:
        task.baton.acquire()
        process = task.process
        try:
            self._swap_in(process)
            if not process.ended:
                task.function()
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001 - who runs the story looks at it
            if task is process.main:
                process.error = error
            else:
                self.note(f"{task} raised {type(error).__name__}: {error}")
        task.function = _nothing
        if task is process.main and not process.ended:
            with contextlib.suppress(Killed):
                self.end_process(process, 0 if process.error is None else 1)
        self._swap_out(process)
        task.done = True
        self.tasks.remove(task)
        if task.reaper is not None:
            task.reaper.release()
            return
        following = self._next()
        self.current = following
        if following is None:
            self._finished.release()
        else:
            following.baton.release()

    # -- whose turn it is

    def step(self, what: str) -> None:
        """An event: time passes, a fault may strike, and another thread may be next."""
        task = self.current
        if task is None or task.process.ended:
            raise Killed
        self.events += 1
        draw = self.random.random()
        self.now_ns += 200 + int(draw * self.event_ns)
        self.digest = zlib.crc32(b"%d %d" % (task.ident, self.now_ns), self.digest)
        if self.verbose:
            self.note(f"  {task}: {what}")
        stores = task.process.stores
        if stores:
            if what not in NO_CALLS:
                self.drain(task.process)
            elif draw * 7919 % 1 < 0.2:
                view, index, _, value = stores.popleft()
                view[index] = value
        if self.events >= self.next_strike:
            self.on_event(self.events)
            if task.process.ended:
                raise Killed
        if self.events > self.most_events or self.now_ns > self.most_ns:
            self._overrun("it takes too long")
            raise Killed
        if draw * 104729 % 1 < self.switch or task.process.stopped_until_ns > self.now_ns:
            self._switch(task)

    def wait(self, ready: Callable[[], bool], timeout_s: float | None) -> None:
        """Pass the baton on until `ready()`, or for so long."""
        task = self.current
        if task is None or task.process.ended:
            raise Killed
        if timeout_s is not None:
            task.deadline_ns = self.now_ns + max(0, round(timeout_s * S))
        task.ready = ready
        self._switch(task)
        task.ready, task.deadline_ns = None, NEVER_NS

    def sleep(self, seconds: float) -> None:
        self.step("sleep")
        self.wait(_never, seconds)

    def drain(self, process: Process) -> None:
        """All that the process has stored becomes visible."""
        while process.stores:
            view, index, _, value = process.stores.popleft()
            view[index] = value

    def _switch(self, task: Task) -> None:
        following = self._next()
        if following is None:  # the story was ended by force
            raise Killed
        if following is not task:
            self._swap_out(task.process)
            self.current = following
            following.baton.release()
            task.baton.acquire()
            self._swap_in(task.process)
        if task.process.ended:
            raise Killed

    def _next(self) -> Task | None:
        """The thread whose turn it is; the clock jumps if all wait."""
        while self.tasks:
            now_ns = self.now_ns
            ready = [task for task in self.tasks if task.is_ready(now_ns)]
            if ready:
                if len(ready) == 1:
                    return ready[0]
                weights = [task.process.weight for task in ready]
                return self.random.choices(ready, weights)[0]
            at_ns = self.times.after(now_ns)
            for task in self.tasks:
                stopped_ns = task.process.stopped_until_ns
                if stopped_ns > now_ns:
                    at_ns = min(at_ns, stopped_ns)
                else:
                    at_ns = min(at_ns, task.deadline_ns)
            if at_ns >= NEVER_NS or at_ns > self.most_ns:
                waiting = ", ".join(map(str, self.tasks))
                self._overrun(f"these wait for ever: {waiting}")
                continue
            self.now_ns = at_ns
        return None

    def _overrun(self, why: str) -> None:
        """End all processes by force."""
        if not self._over:
            self._over = True
            self.overrun = why
            self.note(f"ended by force: {why}")
        for process in list(self.processes.values()):
            self._let_die(process, -SIGKILL)

    def _swap_in(self, process: Process) -> None:
        for (module, name), value in process.own_state.items():
            setattr(module, name, value)

    def _swap_out(self, process: Process) -> None:
        for place in self.own_state:
            process.own_state[place] = getattr(*place)

    # -- processes

    def end_process(self, process: Process, status: int) -> None:
        """End a process: no thread of it goes on, its descriptors are closed."""
        if not process.ended:
            how = f"exit {status}" if status >= 0 else f"signal {-status}"
            self.note(f"{process} ends: {how}")
            self._let_die(process, status)
        if self.current is not None and self.current.process is process:
            raise Killed

    def _let_die(self, process: Process, status: int) -> None:
        if process.ended:
            return
        self.drain(process)
        process.ended, process.status = True, status
        for task in [task for task in self.tasks if task.process is process]:
            if task is not self.current:
                self._reap(task)
        for number in list(process.fds):
            process.close(number)

    def _reap(self, task: Task) -> None:
        """Have a thread of a dead process unwind. What it calls meanwhile raises `Killed`."""
        reaper = _thread.allocate_lock()
        reaper.acquire()
        before = self.current
        if before is not None:
            self._swap_out(before.process)
        task.reaper, self.current = reaper, task
        task.baton.release()
        reaper.acquire()
        self.current = before
        if before is not None:
            self._swap_in(before.process)

    def stop(self, process: Process, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after so long."""
        until_ns = self.now_ns + int(seconds * S)
        process.stopped_until_ns = max(process.stopped_until_ns, until_ns)
        self.times.add(until_ns)

    # -- what is drawn

    def latency_ns(self) -> int:
        if self.late and self.random.random() < self.late:
            return self.random.randrange(self.late_ns)
        return 0

    def splits(self) -> bool:
        return bool(self.split) and self.random.random() < self.split

    def pair(self, pid: int, peer_pid: int, capacity: int) -> tuple[Stream, Stream]:
        one, other = Stream(self, pid, capacity), Stream(self, peer_pid, capacity)
        one.join(other)
        return one, other


CREDENTIALS = struct.Struct("3i")


def readable(process: Process, fds: Sequence[int]) -> list[int]:
    """Which of these are readable, or closed."""
    files = process.fds
    return [fd for fd in fds if fd not in files or files[fd].is_readable()]


def _nothing() -> None:
    return None


def _never() -> bool:
    return False


def _quiet_hook(hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Finalizers of a process that is gone may fail in silence."""

    def quiet(unraisable: Any) -> None:
        if unraisable.exc_type is not Killed:
            hook(unraisable)

    return quiet
