"""Options of the command line, and the reader of those commands that must start fast.

`Parser` (argparse) reads `clusterprof record`, `python -m clusterprof.agent` and usual
command lines of `clusterprof analyze`: a command-line library with rich output would cost
each rank of a job 0.3 s of CPU time. An invalid option is a `UsageError` that names the
nearest valid one. Each `Option` is defined once; typer's declarations, which show the help,
are made from it (`cli.common.declare_option`).

The effective sampling plan: plain numbers combined from the profile and the command line.

The launcher reads the profile (YAML) and writes `plan.json`; the agent reads only that
file, so that it never imports a YAML library.

    {"hz": 10, "collectors": {"cpu": {"enabled": true, "interval_ns": 100000000}},
     "recording": {"segment_bytes": …, "max_bytes": …, "keep_free_bytes": …, "live_helper": 1},
     "profile": {…}, "metrics": ["9640"]}

The request to a recorder, and its reply once it records.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn

from clusterprof.errors import UsageError
from clusterprof.units import SECOND_NS

if TYPE_CHECKING:
    from clusterprof.agent.linux.files import Roots


class Option(NamedTuple):
    """An option of the command line."""

    flags: tuple[str, ...]
    metavar: str | None
    """Name of the value; None = the name of its type."""
    help: str
    type: Callable[[str], Any] = str
    action: Literal["store", "append", "store_true", "switch"] = "store"
    """Takes a value, takes one each time, is a flag, or a flag with a `--no-` form."""
    parameter: str = ""
    """Name of the parameter; "" = that of the flag."""
    minimum: int | None = None
    """Least value of a whole number."""
    words: tuple[str, ...] = ()
    """Known values, which a shell completes; () = those of the metavar."""


OUT = Option(
    ("-o", "--out"), "DIR", "Folder of the recording. Default: clusterprof-out/<job>.", Path
)
PROFILE = Option(("--profile",), "NAME", "Name of a shipped profile, or a file.")
DURATION = Option(("--duration",), "TIME", "Stop recording after this time (90s, 10m, 2h).")
HZ = Option(("--hz",), "N", "Samples per second; slow sources keep their own rate.", float)
INJECT = Option(("--inject",), "auto|off|strict", "Load the probe into the job's Python processes.")
PID = Option(("--pid",), "PID", "Attach to a running process; no spans are recorded.", int)
KEEP_FREE = Option(
    ("--keep-free",), "SIZE", "Pause writing while less disk space than this is free."
)
GPU_EVENTS = Option(
    ("--gpu-events",),
    None,
    "Let the probe record events on the streams of the job's device.",
    bool,
    "switch",
)

STACKS = Option(
    ("--stacks",),
    "on|off",
    "Whether the probe samples Python stacks (paths, functions, lines; no values). Default: on.",
)

MODE = Option(
    ("--mode",),
    "MODE",
    "Who may read the recording, as for chmod: 0750 adds your group. Default: 0700, only you.",
)

METRICS = Option(
    ("--metrics",),
    "TARGET",
    "Publish live metrics: [ADDRESS:]PORT[-LAST], FILE.prom, or otlp:URL. Repeatable.",
    action="append",
)

NCCL = Option(
    ("--nccl",),
    "auto|off",
    "Let NCCL (Inspector) and PyTorch (flight recorder) log operations, unless you set them up.",
)

ON_HANG = Option(
    ("--on-hang",),
    "COMMAND",
    "Run this command once on a node when its ranks make no progress, for 60 s at most.",
)

HANG_AFTER = Option(
    ("--hang-after",),
    "TIME",
    "Report a hang after this time without progress. Default: 3 times the longest pause so far, at"
    " least 30 s, at most 5 min.",
)

DIVE = Option(
    ("--dive",),
    "auto|off|TIME",
    "Run PyTorch's profiler for a few steps when a rank straggles for 2 min (auto) or for TIME.",
)

REDACT = Option(
    ("--redact",),
    None,
    "Replace names of hosts, jobs, paths and addresses in the recording by hashes.",
    bool,
    "store_true",
)

EXPORT = Option(
    ("--export",),
    "sh|slurm",
    "Record process --pid, and print the environment variables that its child processes need: for"
    " eval (sh), or for a Slurm TaskProlog (slurm).",
)

RECORD_OPTIONS = (
    *(OUT, PROFILE, DURATION, HZ, INJECT, PID, GPU_EVENTS, KEEP_FREE, STACKS, MODE),
    *(METRICS, NCCL, ON_HANG, HANG_AFTER, REDACT, EXPORT, DIVE),
)
HELP = ("-h", "--help")
_MAX_DIGITS = 9


def _make_unused_formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.HelpFormatter(prog, width=80)


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises `UsageError` and suggests the nearest valid option."""

    def __init__(self, prog: str, **settings: Any) -> None:
        if not settings.get("add_help", True):  # the terminal's width would import shutil
            settings["formatter_class"] = _make_unused_formatter
        super().__init__(prog=prog, allow_abbrev=False, **settings)

    def add_option(self, option: Option) -> None:
        """Add an option."""
        settings: dict[str, Any] = {"help": option.help}
        if option.parameter:
            settings["dest"] = option.parameter
        if option.action == "switch":
            settings["action"] = argparse.BooleanOptionalAction
        else:
            settings["action"] = option.action
        if option.action in ("store", "append"):
            read = option.type if option.minimum is None else _make_number_reader(option.minimum)
            settings |= {"metavar": option.metavar, "type": read}
        self.add_argument(*option.flags, **settings)

    def parse(self, words: Sequence[str] | None) -> argparse.Namespace:
        """Parse the words.

        Raises: UsageError for an unknown option or an invalid value.
        """
        values, unknown = self.parse_known_args(words)
        if unknown:
            raise self.unknown_option_error(unknown[0])
        return values

    def unknown_option_error(self, word: str) -> UsageError:
        """Return the error for an unknown option, with the nearest valid one."""
        if not word.startswith("-"):
            return UsageError(f"unexpected argument: {word!r}", self._hint())
        name = word.partition("=")[0]
        return UsageError(
            f"no such option: {name}{format_suggestion(name, self._list_flags())}", self._hint()
        )

    def error(self, message: str) -> NoReturn:
        """Raise UsageError instead of printing the message and exiting."""
        raise UsageError(message, self._hint())

    def _list_flags(self) -> list[str]:
        shown = (action for action in self._actions if action.help != argparse.SUPPRESS)
        return [flag for action in shown for flag in action.option_strings]

    def _hint(self) -> str:
        return f"see: {self.prog} --help"


def _make_number_reader(minimum: int) -> Callable[[str], int]:
    """Return a function that reads a whole number of at most nine digits."""

    def read_number(text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS):
            raise ValueError(f"{text!r} is not a whole number")
        if int(text) < minimum:
            raise ValueError(f"{text} is less than {minimum}")
        return int(text)

    return read_number


class RecordOptions(NamedTuple):
    """The options and the command of `clusterprof record`; None = not given."""

    command: Sequence[str]
    out: Path | None = None
    profile: str | None = None
    duration: str | None = None
    hz: float | None = None
    inject: str = "auto"
    pid: int | None = None
    gpu_events: bool = True
    keep_free: str | None = None
    stacks: str | None = None
    mode: str | None = None
    metrics: Sequence[str] | None = None
    nccl: str = "auto"
    on_hang: str | None = None
    hang_after: str | None = None
    redact: bool = False
    export: str | None = None
    dive: str = "off"


def parse_record_arguments(words: Sequence[str]) -> RecordOptions | None:
    """Parse the words after `record`; None when help is requested.

    The first word that is not an option begins the command, which is passed on unchanged.
    Raises: UsageError for an unknown option or a missing value.
    """
    parser = Parser("clusterprof record", add_help=False)
    for option in RECORD_OPTIONS:
        parser.add_option(option)
    parser.set_defaults(inject="auto", gpu_events=True, nccl="auto", dive="off")
    options, command = _split_arguments(words)
    if options is None:
        return None
    return RecordOptions(command, **vars(parser.parse(options)))


def format_suggestion(word: str, candidates: Iterable[str]) -> str:
    """Return '; did you mean …?' when a candidate is close to the word, else ''."""
    import difflib  # only after a mistake

    close = difflib.get_close_matches(word, list(candidates), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def _split_arguments(words: Sequence[str]) -> tuple[list[str] | None, Sequence[str]]:
    """Return the options as `--name=value`, and the command; (None, ()) for help."""
    long_flags = {
        flag: option.flags[-1]
        for option in RECORD_OPTIONS
        if option.action in ("store", "append")
        for flag in option.flags
    }
    options: list[str] = []
    remaining = list(words)
    while remaining:
        word = remaining[0]
        if word == "--":
            return options, remaining[1:]
        if word in HELP:
            return None, ()
        if not word.startswith("-") or word == "-":
            break
        del remaining[0]
        if word in long_flags:
            if not remaining:
                raise UsageError(f"option {word} needs a value", "see: clusterprof record --help")
            # `-o -x` names a folder "-x": joined with `=`, argparse does not read it as an option
            options.append(f"{long_flags[word]}={remaining.pop(0)}")
        else:
            options.append(word)
    return options, remaining


DEFAULT_HZ = 10.0
MIN_HZ = 0.01
MAX_HZ = 1000.0


_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Plan(NamedTuple):
    """Which collectors to sample how often, and how much disk space to use."""

    hz: float = DEFAULT_HZ
    """Rate of the fast group; slower collectors keep their own interval."""
    collectors: Mapping[str, Mapping[str, Any]] = _NOTHING
    """name -> {"enabled", "interval_ns"}; a collector that is not listed keeps its defaults."""
    recording: Mapping[str, int] = _NOTHING
    """segment_bytes, max_bytes, keep_free_bytes; live_helper: 0 = never start; mode: of folders;
    hang_after_ns: when ranks hang; dive_after_ns: when a rank straggles;
    redact: 1 = names are replaced."""
    profile: Mapping[str, Any] = _NOTHING
    """Effective values of the profile, for the header."""
    metrics: Sequence[str] = ()
    """Where live metrics go (`parse_metrics_target`); files with absolute paths."""
    on_hang: str = ""
    """Command that is run when ranks hang; "" = none."""

    def enabled(self, name: str) -> bool:
        """Return whether the collector is opened at all."""
        return bool(self.collectors.get(name, {}).get("enabled", True))

    def use_portable(self) -> bool | None:
        """Return whether the portable collectors replace those of Linux; None = decide by /proc.

        True or False where the profile sets `sampling.collectors.portable.enabled`.
        """
        sampling = self.profile.get("sampling", {})
        enabled = sampling.get("collectors", {}).get("portable", {}).get("enabled")
        return None if enabled is None else bool(enabled)

    def helper_options(self, name: str) -> tuple[str, ...]:
        """Return the extra command-line options of an isolated collector's helper."""
        sampling = self.profile.get("sampling")
        gpm = sampling.get("gpm", "auto") if isinstance(sampling, Mapping) else "auto"
        if name != "gpu_nvidia" or gpm not in (True, False):
            return ()
        return ("--gpm", "on" if gpm else "off")

    def interval_ns(self, name: str, default_ns: int) -> int:
        """Return the collector's interval, ns: its own, unless it belongs to the fast group.

        The fast group holds all collectors planned at 10 Hz or more often; `--hz` changes their
        rate together and slows down other collectors only where they would be faster than that.
        """
        configured_ns = int(self.collectors.get(name, {}).get("interval_ns") or default_ns)
        fast_ns = round(SECOND_NS / self.hz)
        if configured_ns <= round(SECOND_NS / DEFAULT_HZ):
            return fast_ns if self.hz != DEFAULT_HZ else max(configured_ns, fast_ns)
        return max(configured_ns, fast_ns)


def encode_plan(plan: Plan) -> bytes:
    """Encode the plan as the content of `plan.json`."""
    values = {
        "hz": plan.hz,
        "collectors": {name: dict(entry) for name, entry in plan.collectors.items()},
        "recording": dict(plan.recording),
        "profile": dict(plan.profile),
        "metrics": list(plan.metrics),
        "on_hang": plan.on_hang,
    }
    return json.dumps(values).encode()


def decode_plan(content: bytes) -> Plan:
    """Decode the content of a `plan.json`.

    Raises: UsageError when the content is not a valid plan.
    """
    try:
        values = json.loads(content)
        collectors = values.get("collectors", {})
        plan = Plan(
            hz=float(values.get("hz", DEFAULT_HZ)),
            collectors={str(name): dict(entry) for name, entry in collectors.items()},
            recording={str(k): int(v) for k, v in values.get("recording", {}).items()},
            profile=dict(values.get("profile", {})),
            metrics=tuple(str(target) for target in values.get("metrics", ())),
            on_hang=str(values.get("on_hang", "")),
        )
    except (ValueError, TypeError, AttributeError) as error:
        raise UsageError(f"the sampling plan cannot be read: {error}") from error
    return with_hz(plan, plan.hz)


def with_hz(plan: Plan, hz: float) -> Plan:
    """Return the plan with another rate of the fast group.

    Raises: UsageError when the rate is out of range.
    """
    if not MIN_HZ <= hz <= MAX_HZ:
        raise UsageError(f"{hz:g} Hz is not between {MIN_HZ:g} and {MAX_HZ:g}")
    return plan._replace(hz=hz)


def with_mode(plan: Plan, mode: int) -> Plan:
    """Return the plan with the mode of the recording's folders."""
    return plan._replace(recording={**plan.recording, "mode": mode})


def with_metrics(
    plan: Plan, targets: Sequence[str], environ: Mapping[str, str], folder: Path
) -> Plan:
    """Return the plan with more places for live metrics; those of the plan are checked, too.

    folder: where relative file names begin. environ: may hold the token.
    Raises: UsageError for a target that is none.
    """
    checked = []
    for text in dict.fromkeys((*plan.metrics, *targets)):
        target = parse_metrics_target(text, environ)
        checked.append(str(folder / text) if target.kind == "textfile" else text)
    return plan._replace(metrics=tuple(checked))


def with_hang_options(plan: Plan, on_hang: str, hang_after_ns: int | None) -> Plan:
    """Return the plan with the actions to take when ranks hang.

    hang_after_ns: after which time they do; None = derived from the pace of the run.
    """
    recording = dict(plan.recording)
    if hang_after_ns is not None:
        recording["hang_after_ns"] = hang_after_ns
    return plan._replace(recording=recording, on_hang=on_hang)


def with_dive(plan: Plan, dive_after_ns: int) -> Plan:
    """Return the plan with profiler windows of a rank that straggles for this time."""
    return plan._replace(recording={**plan.recording, "dive_after_ns": dive_after_ns})


def with_redaction(plan: Plan) -> Plan:
    """Return the plan of a recording in which names are replaced by hashes."""
    return plan._replace(recording={**plan.recording, "redact": 1})


def parse_mode(text: str) -> int:
    """Convert the mode of a recording's folders, e.g. 0750, to its bits.

    Raises: UsageError for anything that is no octal number, takes a right from the owner, or
    lets other users write.
    """
    try:
        mode = int(text, 8)
    except ValueError:
        mode = -1
    if not 0 <= mode <= 0o777 or mode & 0o700 != 0o700 or mode & 0o022:
        raise UsageError(
            f"--mode {text}: not a mode in which you have all rights and others may only read",
            "write 0700 (only you), 0750 (your group too) or 0755 (everybody)",
        )
    return mode


def build_plan(
    profile: Mapping[str, Any], hz: float | None = None, keep_free_bytes: int | None = None
) -> Plan:
    """Build the plan from a profile's effective values and the command line.

    hz, keep_free_bytes: override the profile unless None.
    Raises: UsageError when the rate is out of range.
    """
    sampling = profile.get("sampling", {})
    collectors = {}
    for name, settings in sampling.get("collectors", {}).items():
        entry: dict[str, Any] = {"enabled": bool(settings.get("enabled", True))}
        if settings.get("hz"):
            entry["interval_ns"] = round(SECOND_NS / settings["hz"])
        collectors[name] = entry
    recording = {key: int(value) for key, value in profile.get("recording", {}).items()}
    if keep_free_bytes is not None:
        recording["keep_free_bytes"] = keep_free_bytes
    rate = hz if hz is not None else float(sampling.get("hz", DEFAULT_HZ))
    metrics = tuple(profile.get("metrics", {}).get("to", ()))
    if metrics or "metrics" in profile:
        recording["metrics_interval_s"] = int(profile["metrics"].get("interval_s", 15))
    return with_hz(Plan(rate, collectors, recording, profile, metrics), rate)


TOKEN_VARIABLE = "CLUSTERPROF_METRICS_TOKEN"
"""Environment variable of the token that a scrape must present; never an option, which every user
of the machine could read."""
_METRICS_FORMS = (
    "write PORT (loopback), ADDRESS:PORT, PORT-LAST for the first free one, FILE.prom, or"
    " otlp:http://HOST:4318"
)


class MetricsTarget(NamedTuple):
    """Where live metrics go."""

    kind: Literal["http", "textfile", "otlp"]
    destination: str
    """The address to listen on, the file, or the address of the receiver."""
    ports: Sequence[int] = ()
    """The first and the last port to listen on; the first free one is taken."""


def parse_metrics_target(text: str, environ: Mapping[str, str]) -> MetricsTarget:
    """Parse one value of `--metrics`.

    Raises: UsageError for an unknown form, and for an address beyond loopback without a token.
    """
    if text.startswith("otlp:"):
        return MetricsTarget("otlp", _check_receiver(text.removeprefix("otlp:")))
    if text.endswith(".prom"):
        return MetricsTarget("textfile", text)
    address, _, ports_text = text.rpartition(":")
    first, dash, last = ports_text.partition("-")
    words = (first, last) if dash else (first, first)
    if not all(word.isascii() and word.isdigit() and len(word) <= 5 for word in words):
        raise UsageError(f"--metrics {text!r} is no target", _METRICS_FORMS)
    ports = tuple(int(word) for word in words)
    if not 0 < ports[0] <= ports[1] <= 65535:
        raise UsageError(f"--metrics {text!r}: ports are 1 to 65535", _METRICS_FORMS)
    address = address.removeprefix("[").removesuffix("]") or "127.0.0.1"
    if not _is_loopback(address) and not environ.get(TOKEN_VARIABLE):
        raise UsageError(
            f"--metrics {text!r} listens beyond this machine without a token",
            f"set {TOKEN_VARIABLE}, which every scrape must present as its bearer token",
        )
    return MetricsTarget("http", address, ports)


def _check_receiver(url: str) -> str:
    """Return the address of a receiver if it is one, without a password."""
    scheme, separator, address = url.partition("://")
    if scheme not in ("http", "https") or not separator or not address.strip("/"):
        raise UsageError(f"--metrics otlp:{url} is not an address", _METRICS_FORMS)
    if "@" in address.partition("/")[0]:
        raise UsageError(
            "--metrics otlp: carries a user or password, which every user of this machine can read",
            "set OTEL_EXPORTER_OTLP_HEADERS='Authorization=…'",
        )
    return url


def _is_loopback(address: str) -> bool:
    return address in ("localhost", "::1") or (
        address.startswith("127.") and address.replace(".", "").isdigit()
    )


DEFAULT_OUT = "clusterprof-out"
_NS_PER_UNIT = {"": 1e9, "ms": 1e6, "s": 1e9, "m": 60e9, "min": 60e9, "h": 3600e9, "d": 86400e9}


def parse_duration(text: str) -> int:
    """Convert a duration, e.g. 10m, 90s, 1.5h or 45 (seconds) to nanoseconds.

    Raises: UsageError when the text is not a positive duration.
    """
    stripped = text.strip()
    number = stripped.rstrip("abcdefghijklmnopqrstuvwxyz ")
    unit = stripped[len(number) :].strip()
    try:
        value = float(number) * _NS_PER_UNIT[unit]
    except (ValueError, KeyError):
        value = math.nan
    if not 0 < value < 2**62:
        raise UsageError(f"{text!r} is not a duration", "write 90s, 10m or 2h")
    return round(value)


class RecordingRequest(NamedTuple):
    """The request for one recording of one node."""

    out: Path
    """Folder of the recording; the node's subfolder is created in it."""
    run_dir: Path
    plan: Plan
    job: str
    roots: Roots
    """Where the kernel's files lie."""
    follow: bool = False
    """End when the last registered process has exited."""
    duration_ns: int | None = None
    """End after this time, ns; None = no limit."""
    pid: int | None = None
    """Attach to this running process."""


class UnavailableCollector(NamedTuple):
    """A collector that is unavailable, and the reason."""

    collector: str
    kind: str
    message: str
    remedy: str


class RecordingStarted(NamedTuple):
    """The recorder's reply when the recording has begun."""

    folder: Path
    """The node's folder."""
    unseen: Sequence[UnavailableCollector]
    emulated: bool
    """True when one of the accelerators is emulated."""
    notes: Sequence[str] = ()
    """What a user must know: why nothing reaches the disk yet, and of the live metrics."""
