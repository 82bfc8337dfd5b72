"""One loop over all files of the collectors that only read files: most of what a tick does.

After a sleep every different piece of code costs a walk to memory, so the files of several
collectors are read by one line of code, and who they belong to is asked once. Whatever is not as
usual (a file that has gone, is denied or has become too long, a collector that was opened anew)
sends all of them to their collectors for that tick, where it is dealt with one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import ge
from os import pread

from clusterprof.linux.held import HeldFile
from clusterprof.recorder.slot import Slot


class Sweep:
    """Slots of one interval that are due together; `due_ns` is when."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.due_ns = 0
        self.stale = True
        """True when a slot is not what it was, or a file: `gather` is due."""
        self.members: list[Slot] = []
        self._candidates = slots
        self._keeps: list[tuple[Callable[[tuple[int, list[bytes]]], None], int, int]] = []
        self._files: list[tuple[int, int]] = []  # descriptor, bytes
        self._whole: list[int] = []
        self._since_ns = 0  # what `due_ns` was when the members came together
        for slot in slots:
            slot.on_change = self._changed

    def gather(self) -> None:
        """Choose anew whose files are read together, and give the others back to themselves."""
        for slot in self.members:
            if slot.due_ns == self._since_ns:  # else it rests, or has been opened for another time
                slot.due_ns = self.due_ns
        self.stale = False
        found = [(slot, files) for slot in self._candidates if (files := slot.files())]
        self.due_ns = self._since_ns = min((slot.due_ns for slot, _ in found), default=0)
        self.members, self._keeps, held = [], [], list[HeldFile]()
        for slot, files in found:
            if slot.due_ns == self.due_ns:
                self.members.append(slot)
                self._keeps.append((slot.keep, len(held), len(held) + len(files)))
                held += files
        once = [how for file in held if (how := file.once) is not None]
        self._files = [(descriptor, size) for descriptor, size, _ in once]
        self._whole = [whole for _, _, whole in once]

    def tick(self, t_ns: int) -> None:
        """Take a reading of every member."""
        try:
            contents = [pread(descriptor, size, 0) for descriptor, size in self._files]
            usual = True not in map(ge, map(len, contents), self._whole)
        except OSError:
            usual = False
        if usual:
            for keep, begin, end in self._keeps:
                keep((t_ns, contents[begin:end]))
            return
        self.stale = True  # it may have been opened anew, or be too long from now on
        for slot in self.members:
            slot.tick(t_ns)

    def _changed(self) -> None:
        self.stale = True
