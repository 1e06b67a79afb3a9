"""A run that chaos happens to: its processes, its folder, and the point at which it stops."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
TRACER = Path(__file__).parent / "tracer"
BOUND_S = 150.0  # a run that takes longer hangs
MARK = "LOCKSTEP_CHAOS_VICTIM"


class Victim:
    """One run by the command line, in a folder of its own, which holds all its temporary files."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.home = folder / "home"
        self.directory = self.home / "run"
        self.temporary = folder / "tmp"
        self.errors = folder / "errors"
        self.reporter: int | None = None  # the process that is at the point
        self.process: subprocess.Popen[bytes] | None = None
        self.mounted = False
        self._listener: socket.socket | None = None
        self._line: socket.socket | None = None
        for place in (self.home, self.temporary):
            place.mkdir(parents=True)

    # -- running

    def start(
        self,
        overrides: Sequence[str],
        *,
        plan: dict[str, object] | None = None,
        environment: dict[str, str] | None = None,
        before: Sequence[str] = (),
    ) -> None:
        """Start the run; with a plan, `meet` it at the point."""
        self.reporter = self._line = None
        env = {**os.environ, "TMPDIR": str(self.temporary), MARK: str(self.folder)}
        env |= {"HOME": str(self.folder), "PYTHONPATH": str(ROOT), **(environment or {})}
        if plan is not None:
            address = self.folder / f"at-{time.monotonic_ns() % 10**9}"
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(str(address))
            self._listener.listen()
            file = self.folder / "plan.json"
            file.write_text(
                json.dumps({**plan, "socket": str(address), "once": str(self.folder / "reached")})
            )
            env |= {"LOCKSTEP_CHAOS": str(file), "PYTHONPATH": f"{TRACER}:{ROOT}"}
        with (self.folder / "output").open("wb") as output:
            self.process = subprocess.Popen(
                [*before, sys.executable, str(ROOT / "run.py"), *overrides],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.PIPE,  # and no file, whose size may be limited
                env=env,
                start_new_session=True,  # a signal to the group is a terminal's Ctrl-C
            )
        self._reader = threading.Thread(target=self._read, args=(self.process,), daemon=True)
        self._reader.start()

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        """What it says, until the last of its processes is gone."""
        assert process.stderr is not None
        with self.errors.open("wb", buffering=0) as errors, process.stderr:
            while said := os.read(process.stderr.fileno(), 1 << 16):
                errors.write(said)

    def meet(self) -> bool:
        """Wait until the run is at the point; False if it ends before it gets there."""
        assert self._listener is not None
        deadline = time.monotonic() + BOUND_S
        self._listener.settimeout(0.05)
        while self._line is None:
            try:
                self._line, _ = self._listener.accept()
            except TimeoutError:
                if self.has_ended() or time.monotonic() > deadline:
                    return False
        self._line.settimeout(5.0)
        told = self._line.recv(20)
        self.reporter = int(told) if told else None
        return self.reporter is not None

    def release(self) -> None:
        """Let the run go on from the point."""
        for end in (self._line, self._listener):
            if end is not None:
                end.close()
        self._line = self._listener = None

    def has_ended(self) -> bool:
        assert self.process is not None
        return self.process.poll() is not None

    def wait(self) -> int | None:
        """The exit status; None if it does not end in time, and was killed."""
        assert self.process is not None
        try:
            status = self.process.wait(BOUND_S)
        except subprocess.TimeoutExpired:
            return None
        self._reader.join(5.0)  # longer if something of it is left running, which is a finding
        return status

    def end(self) -> None:
        """Leave nothing of it, whatever it did."""
        self.release()
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if self.process is not None:
            self.process.wait()

    def remove(self) -> None:
        """Remove its folder."""
        if self.mounted:
            subprocess.run(["umount", "-l", str(self.home)], check=False)
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- whom to hit

    @property
    def trainer(self) -> int:
        assert self.process is not None
        return self.process.pid

    def processes(self) -> list[psutil.Process]:
        """All living processes that come from this run, however far they went."""
        mark = f"{MARK}={self.folder}".encode()
        found = []
        for entry in os.listdir("/proc"):
            if not entry.isdigit() or int(entry) == os.getpid():
                continue
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                if mark in Path("/proc", entry, "environ").read_bytes().split(b"\0"):
                    process = psutil.Process(int(entry))
                    if process.status() != psutil.STATUS_ZOMBIE:
                        found.append(process)
        return found

    def pids(self, role: str) -> list[int]:
        """The processes of a role: trainer, worker (a host, too), actor, fork server, ..."""
        if role == "trainer":
            return [self.trainer]
        found = {p.pid: (p.ppid(), " ".join(p.cmdline())) for p in self.processes()}
        servers = [pid for pid, (_, line) in found.items() if "forkserver import main" in line]
        mothers = [pid for pid in servers if found[pid][0] == self.trainer]
        if role == "fork server":
            return mothers
        if role == "worker":
            return [pid for pid in servers if found[pid][0] in mothers]
        if role == "actor":
            # Not Ray's own agents, which are called so, too: without them Ray ends the trainer.
            return [pid for pid, (_, line) in found.items() if line.startswith("ray::HostActor")]
        word = {"tracker": "resource_tracker import main", "wandb": "wandb-core"}[role]
        return [pid for pid, (_, line) in found.items() if word in line]

    def send(self, signum: int, role: str, which: int = 0) -> bool:
        """A signal to a process; False if there is none of that role."""
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if role == "group":
                os.killpg(self.trainer, signum)
                return True
            pids = self.pids(role)
            if pids:
                os.kill(pids[which % len(pids)], signum)
                return True
        return False

    def hold(self, role: str, which: int, seconds: float | None) -> bool:
        """SIGSTOP, and SIGCONT after so long."""
        pids = self.pids(role)
        if not pids:
            return False
        pid = pids[which % len(pids)]
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            if seconds is not None:
                self.release()
                time.sleep(seconds)
                os.kill(pid, signal.SIGCONT)
        return True

    # -- its disk

    def mount(self, size: str) -> None:
        """Give it a small disk of its own."""
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "chaos", str(self.home)], check=True
        )
        self.mounted = True

    def fill_disk(self) -> None:
        """Until not one byte more fits."""
        with (self.home / "filler").open("wb", buffering=0) as stream:
            for size in (1 << 16, 1 << 10, 1):
                with contextlib.suppress(OSError):
                    while stream.write(b"x" * size) == size:
                        pass

    def lock_disk(self, locked: bool) -> None:
        """Have nothing be written to it that is not open yet; or again."""
        if locked:
            subprocess.run(["mount", "--bind", self.home, self.home], check=True)
            subprocess.run(["mount", "-o", "remount,bind,ro", self.home], check=True)
        else:
            subprocess.run(["umount", "-l", self.home], check=True)
