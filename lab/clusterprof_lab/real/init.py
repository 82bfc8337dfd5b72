"""Process 1 of a node: sets up what a machine of its own would have, then reaps and waits.

It ends when its stdin does. The kernel then ends every process of the node, so nothing is left of a
node whose test has died.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

OWN = "/dev/shm"


def mount_filesystems(*words: str) -> None:
    subprocess.run(["mount", *words], check=True)


def override_file(path: str, text: str) -> None:
    """Let `path` read as `text` in this node only."""
    own = Path(OWN) / f".{Path(path).name}"
    own.write_text(text)
    mount_filesystems("--bind", str(own), path)


def set_identity(name: str, boot_id: str, hosts: str) -> None:
    socket.sethostname(name)
    mount_filesystems("-t", "tmpfs", "-o", "mode=1777", "tmpfs", OWN)
    os.mkdir(f"{OWN}/tmp", 0o1777)
    override_file("/proc/sys/kernel/random/boot_id", boot_id + "\n")
    override_file("/etc/hosts", hosts)
    # A fresh /sys shows this node's network interfaces; the control groups stay the machine's.
    aside = f"{OWN}/.cgroup"
    os.mkdir(aside)
    mount_filesystems("--rbind", "/sys/fs/cgroup", aside)
    mount_filesystems("-t", "sysfs", "sysfs", "/sys")
    mount_filesystems("--move", aside, "/sys/fs/cgroup")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    # What a namespace is free to choose; the same on every machine, and it backs off at a loss.
    Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text("reno")


def main() -> None:
    set_identity(**json.loads(sys.argv[1]))
    wake, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writer)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    print("ready", flush=True)
    while True:
        ready, _, _ = select.select([0, wake], [], [])
        if 0 in ready and not os.read(0, 1):
            return
        if wake in ready:
            os.read(wake, 512)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                pass


if __name__ == "__main__":
    main()
