"""What `doctor` prints of the sources: what somebody can change first, what is not here last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from clusterprof.renderers.text_safety import safe_text, wrap

if TYPE_CHECKING:
    from clusterprof.recorder.inspect import Hole, Look

WIDTH = 80
_NARROWEST = 60
_STATUS = 9
_SIGNALS_AT_MOST = 4
_DEVICES_AT_MOST = 2
_HOLES_AT_MOST = 6
_NOT_YET = "known from the second sample on"  # doctor takes one


def looks_text(looks: Sequence[Look], width: int = WIDTH) -> str:
    """Return the table of sources, at most `width` columns wide."""
    width = max(width, _NARROWEST)
    here = [look for look in looks if not look.elsewhere]
    name_width = max((len(look.name) for look in here), default=0)
    lines = [_headline(here)]
    for part in _parts(here):
        if part:
            lines.append("")
        for look in part:
            lines += _look(look, name_width, width)
    away = [look.elsewhere for look in looks if look.elsewhere]
    if away:
        lines += ["", *wrap(f"Not on this node: {', '.join(away)}.", width)]
    return "\n".join(lines) + "\n"


def looks_document(looks: Sequence[Look]) -> list[dict[str, Any]]:
    """Return the sources as JSON has them."""
    return [
        {
            "name": look.name,
            "status": look.status,
            "found": look.found,
            "message": look.message,
            "remedy": look.remedy,
            "owner": look.owner,
            "missing": list(look.missing),
            "holes": [
                {
                    "signals": list(hole.signals),
                    "devices": list(hole.devices),
                    "kind": hole.kind,
                    "message": hole.message,
                    "remedy": hole.remedy,
                    "owner": hole.owner,
                }
                for hole in look.holes
            ],
            "elsewhere": look.elsewhere,
        }
        for look in looks
    ]


def hanging(label: str, text: str, width: int, limit: int = 500) -> list[str]:
    """Return a label and a text broken into lines, all of them behind the label's columns."""
    indent = " " * len(label)
    lines = wrap(safe_text(text, limit), max(width - len(label), 20), indent)
    return [label + lines[0][len(label) :], *lines[1:]] if lines else [label.rstrip()]


def _headline(here: Sequence[Look]) -> str:
    seen = sum(look.status == "available" for look in here)
    return f"{seen} of the {len(here)} sources of this node can be recorded."


def _parts(here: Sequence[Look]) -> tuple[list[Look], list[Look], list[Look]]:
    """Return what cannot be seen, accelerators, and the rest, each in the order of the registry."""
    unseen = [look for look in here if look.status != "available"]
    seen = [look for look in here if look.status == "available"]
    devices = [look for look in seen if look.name.startswith("gpu_")]
    return unseen, devices, [look for look in seen if look not in devices]


def _look(look: Look, name_width: int, width: int) -> list[str]:
    label = f"{look.name:<{name_width}}  {look.status:<{_STATUS}}  "
    below = " " * len(label)
    lines = hanging(label, look.found if look.status == "available" else look.message, width)
    if look.remedy:
        lines += hanging(below, f"{look.owner}: {look.remedy}", width)
    elif look.owner:
        lines.append(below + look.owner)
    holes = [hole for hole in _laid_together(look.holes) if hole.message != _NOT_YET]
    holes.sort(key=lambda hole: not hole.remedy)
    for hole in holes[:_HOLES_AT_MOST]:
        lines += hanging(below, _hole(hole), width, 1000)
        if hole.remedy:
            lines += hanging(f"{below}  ", f"{hole.owner}: {hole.remedy}", width)
    if len(holes) > _HOLES_AT_MOST:
        more = len(holes) - _HOLES_AT_MOST
        lines += hanging(below, f"and without others, for {more} more reasons: --json", width)
    return lines


def _laid_together(holes: Sequence[Hole]) -> list[Hole]:
    """Lay together what one reason hides on different devices: all of it, told once."""
    from clusterprof.recorder.inspect import Hole

    alike: dict[tuple[str, str], list[Hole]] = {}
    for hole in holes:
        alike.setdefault((hole.message, hole.remedy), []).append(hole)
    out = []
    for some in alike.values():
        signals = dict.fromkeys(signal for hole in some for signal in hole.signals)
        devices = dict.fromkeys(device for hole in some for device in hole.devices)
        whole = any(not hole.devices for hole in some)
        first = some[0]
        out.append(
            Hole(
                tuple(signals), () if whole else tuple(devices),
                first.kind, first.message, first.remedy, first.owner,
            )
        )  # fmt: skip
    return out


def _hole(hole: Hole) -> str:
    shown = [hole.signals[0]]
    family = hole.signals[0].partition(".")[0] + "."
    shown += [name.removeprefix(family) for name in hole.signals[1:_SIGNALS_AT_MOST]]
    names = ", ".join(shown)
    if len(hole.signals) > _SIGNALS_AT_MOST:
        names += f" and {len(hole.signals) - _SIGNALS_AT_MOST} more"
    of = ", ".join(hole.devices[:_DEVICES_AT_MOST])
    if len(hole.devices) > _DEVICES_AT_MOST:
        of += f" and {len(hole.devices) - _DEVICES_AT_MOST} more"
    return f"without {names}{f' of {of}' if of else ''}: {hole.message}"
