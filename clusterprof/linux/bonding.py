"""/sys/class/net/<bond>/bonding: which interfaces a bond is made of, and which of them are down.

https://docs.kernel.org/networking/bonding.html

    bond0/bonding/mode                       802.3ad 4
    bond0/bonding/slaves                     ens2f0 ens3f0
    ens3f0/bonding_slave/mii_status          down
    ens3f0/bonding_slave/state               backup

`slaves` takes the network stack's lock and is read once; who is a member also stands in the bond's
folder, as links `lower_<name>`. What a bond carried its members carried: its counters are theirs
added up, and counting both counts everything twice. A team device has no such files; its members
are `lower` in the header.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from clusterprof.linux.held import HeldFile, HeldFolder, MissingFile, hold
from clusterprof.linux.roots import Roots
from clusterprof.linux.tree import text

MEMBERS_AT_MOST = 32
UP = "up"


def mode(roots: Roots, nic: str) -> str:
    """Return how a bond uses its members ("802.3ad", "active-backup", …); "" of no bond."""
    words = text(roots.sys / "class/net" / nic / "bonding/mode").split()
    return words[0] if words else ""


def members(roots: Roots, bond: str) -> list[str]:
    """Return the members of a bond, in order; [] of what is none."""
    found = text(roots.sys / "class/net" / bond / "bonding/slaves").split()
    return sorted(found)[:MEMBERS_AT_MOST]


def is_up(roots: Roots, member: str) -> bool | None:
    """Say whether the bond takes a member's link for up; None when it does not tell."""
    status = text(roots.sys / "class/net" / member / "bonding_slave/mii_status")
    return status == UP if status else None


class Bond:
    """A bond whose members are asked again and again whether they are up."""

    def __init__(self, roots: Roots, name: str) -> None:
        """Open the state of every member."""
        self.name = name
        self.members = members(roots, name)
        net = roots.sys / "class/net"
        self._held: list[HeldFile | MissingFile] = [
            hold(net / member / "bonding_slave/mii_status") for member in self.members
        ]
        self._folder = HeldFolder(net / name)
        self._since_ns = self._folder.changed_ns()

    def changed(self) -> bool:
        """Say whether members have come or gone."""
        return self._folder.changed_ns() != self._since_ns

    def down(self) -> list[str]:
        """Return the members that are down; raises Unavailable when one does not tell."""
        states = [held.read().strip().decode("ascii", "replace") for held in self._held]
        return [member for member, state in zip(self.members, states) if state != UP]

    def close(self) -> None:
        """Close all files."""
        for held in (*self._held, self._folder):
            held.close()


def bonds(roots: Roots, nics: Iterable[str]) -> list[Bond]:
    """Return those of these interfaces that are bonds with members, opened."""
    net = roots.sys / "class/net"
    found = [Bond(roots, nic) for nic in nics if os.path.isdir(net / nic / "bonding")]
    return [bond for bond in found if bond.members]
