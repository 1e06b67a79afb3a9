r"""Hosts on one machine: network namespaces with addresses and cables of their own.

    trainer's namespace ---- bridge ---- host 0   10.77.0.10
      10.77.0.1                  \------ host 1   10.77.0.11

A host is a namespace; its cable is one end of a veth pair, which can be pulled.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sync.remote import rpc_group

TRAINER = "10.77.0.1"


def keep_to_the_cable() -> None:
    """Have this process send nothing past the network to another of this machine, as RPC would."""
    rpc_group.BETWEEN_MACHINES = {"_transports": ["uv"], "_channels": ["mpt_uv", "basic"]}


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def why_not() -> str:
    """Why there can be no namespaces here; empty if there can."""
    name = f"ls-probe-{os.getpid()}"  # its own: tests run side by side, and each asks
    one, other = f"lsp{os.getpid()}a", f"lsp{os.getpid()}b"
    try:
        run("ip", "netns", "add", name)
        try:
            run("ip", "link", "add", one, "type", "veth", "peer", "name", other)
            run("ip", "link", "del", one)
        finally:
            run("ip", "netns", "del", name)
    except FileNotFoundError:
        return "there is no `ip` command"
    except subprocess.CalledProcessError as error:
        return f"no network namespaces: {error.stderr.strip()}"
    return ""


def host_name(tag: str, host: int) -> str:
    """The namespace of a host in the network of this tag."""
    return f"{tag}-{host}"


class Network:
    """A switch with hosts; the trainer runs in a namespace too, so that nothing else is touched."""

    def __init__(self, hosts: int):
        self.tag = f"ls{os.getpid() % 10_000}"
        self.processes: list[subprocess.Popen[str]] = []
        self.names = [self._name("t"), *(host_name(self.tag, host) for host in range(hosts))]
        self.switch = self._name("sw")
        self.addresses = [TRAINER, *(f"10.77.0.{10 + host}" for host in range(hosts))]
        run("ip", "netns", "add", self.switch)
        self._in(self.switch, "ip", "link", "add", "br0", "type", "bridge")
        self._in(self.switch, "ip", "link", "set", "br0", "up")
        for number, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            run("ip", "netns", "add", name)
            port = f"port{number}"
            command = ["ip", "link", "add", port, "netns", self.switch, "type", "veth"]
            run(*command, "peer", "name", "eth0", "netns", name)
            self._in(self.switch, "ip", "link", "set", port, "master", "br0", "up")
            self._in(name, "ip", "link", "set", "lo", "up")
            self._in(name, "ip", "addr", "add", f"{address}/24", "dev", "eth0")
            self._in(name, "ip", "link", "set", "eth0", "up")

    def _name(self, what: str) -> str:
        return f"{self.tag}-{what}"

    def _in(self, name: str, *command: str) -> None:
        run("ip", "netns", "exec", name, *command)

    def pull(self, host: int) -> None:
        """Pull this host's cable."""
        self._in(self.switch, "ip", "link", "set", f"port{host + 1}", "down")

    def plug(self, host: int) -> None:
        """Put it in again."""
        self._in(self.switch, "ip", "link", "set", f"port{host + 1}", "up")

    def slow_down(self, host: int, rate: str) -> None:
        """Let no more than `rate` through to this host."""
        bucket = ["tc", "qdisc", "add", "dev", f"port{host + 1}", "root", "tbf", "rate", rate]
        self._in(self.switch, *bucket, "burst", "32kbit", "latency", "400ms")

    def received(self, host: int) -> int:
        """Bytes that came to this host through its cable."""
        file = "/sys/class/net/eth0/statistics/rx_bytes"
        command = ["ip", "netns", "exec", self.names[host + 1], "cat", file]
        return int(subprocess.run(command, check=True, capture_output=True).stdout)

    def start(self, host: int | None, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        """A Python program on a host, or (None) on the trainer's."""
        name = self.names[0 if host is None else host + 1]
        command = ["ip", "netns", "exec", name, sys.executable, *arguments]
        process = subprocess.Popen(command, text=True, **options)
        self.processes.append(process)
        return process

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        for name in [*self.names, self.switch]:
            with contextlib.suppress(subprocess.CalledProcessError):
                run("ip", "netns", "del", name)


@contextmanager
def network(hosts: int) -> Iterator[Network]:
    """Hosts while the body runs; nothing of them afterwards."""
    net = Network(hosts)
    try:
        yield net
    finally:
        net.close()
