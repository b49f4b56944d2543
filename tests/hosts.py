"""Several hosts on one machine: network namespaces on a bridge, each with an address of its own."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from needed import absent

INTERFACE = "eth0"
_numbers = itertools.count()


@dataclass(frozen=True)
class Host:
    namespace: str
    address: str

    @property
    def prefix(self) -> tuple[str, ...]:
        """Before a command that is to run there."""
        return ("ip", "netns", "exec", self.namespace)


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """Hosts 10.77.0.1, 10.77.0.2, ... on one network without a way out; skips the test where that is not allowed."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        absent("network namespaces need root and iproute2's ip")
    tag = f"tm{os.getpid() % 10_000}x{next(_numbers)}"
    made = [Host(f"{tag}-{index}", f"10.77.0.{index}") for index in range(1, count + 1)]
    switch = f"{tag}-net"  # the bridge lives in a namespace too: nothing is added to this machine's own network
    try:
        _ip("netns", "add", switch, skip=True)
        _inside(switch, "link", "add", "bridge", "type", "bridge", skip=True)
        _inside(switch, "link", "set", "bridge", "up")
        for index, host in enumerate(made):
            port = f"port{index}"
            _ip("netns", "add", host.namespace)
            _inside(switch, "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", host.namespace)
            _inside(switch, "link", "set", port, "master", "bridge", "up")
            _inside(host.namespace, "addr", "add", f"{host.address}/24", "dev", INTERFACE)
            _inside(host.namespace, "link", "set", INTERFACE, "up")
            _inside(host.namespace, "link", "set", "lo", "up")
        yield made
    finally:
        for namespace in (switch, *(host.namespace for host in made)):
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True)


def _inside(namespace: str, *arguments: str, skip: bool = False) -> None:
    _ip("-n", namespace, *arguments, skip=skip)


def _ip(*arguments: str, skip: bool = False) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode and skip:
        absent(f"no network namespaces here: {done.stderr.strip()}")
    assert not done.returncode, (arguments, done.stderr)
