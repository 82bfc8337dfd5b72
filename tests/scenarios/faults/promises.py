"""The promises of clusterprof, G1 to G45: what each says, and which faults and tests try it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Promise:
    """One promise, as the page prints it."""

    number: int
    text: str
    faults: tuple[str, ...] = ()
    """Names of faults that try it."""
    tests: tuple[str, ...] = ()
    """Test files and folders that try it."""
    shortfall: str = ""
    """What is promised by nobody yet, or known not to hold."""
    untried: str = ""
    """Why it is not tried; "" = it is, or it only has not been yet."""

    @property
    def name(self) -> str:
        """G and the number."""
        return f"G{self.number}"


GROUPS: tuple[tuple[str, tuple[Promise, ...]], ...] = (
    (
        "Durability",
        (
            Promise(
                1,
                "After a `kill -9` of the recorder, of its helper or of everything, the recording "
                "opens, no damaged frame is used, and at most 1 s is lost; of GPUs what they do "
                "until a new helper has started.",
                ("kill-recorder", "kill-helper", "kill-both"),
                ("tests/scenarios/recording/test_killed.py",),
            ),
            Promise(
                2,
                "A file that is cut at any byte gives all its complete frames, and says that it "
                "is cut.",
                ("file-cut", "recording-damaged"),
                ("tests/trace/test_reader_damage.py",),
            ),
            Promise(
                3,
                "Every flipped bit and overwritten block is detected; it costs the frames it "
                "touches "
                "and no other.",
                ("bit-flipped", "block-overwritten"),
                ("tests/trace/test_reader_damage.py",),
            ),
            Promise(
                4,
                "After a crash of the host at most 6 s are lost.",
                ("host-crash",),
                shortfall="Not promised: the kernel decides when frames reach the disk (30 s by "
                "default); `fdatasync` is not called. What is there can be read.",
            ),
            Promise(
                5,
                "A disk that is full, read-only or failing pauses the recording, never the job; "
                "recording goes on within 5 s of its recovery and states what is missing.",
                ("disk-full", "call-fails", "small-files", "disk-slow"),
                (
                    "tests/trace/test_writer_full_disk.py",
                    "tests/scenarios/recording/test_troubles.py",
                ),
                shortfall="While a write is slow, nothing is sampled: the recorder writes between "
                "two ticks.",
            ),
            Promise(
                6,
                "Memory, descriptors, threads and files do not grow with the length of the run; "
                "the "
                "oldest segments are dropped above a limit, and counted.",
                ("written-day", "many-steps", "million-steps"),
                ("tests/trace/test_segments.py",),
                shortfall="No run of a week was made.",
            ),
            Promise(
                7,
                "No failing call of the operating system crashes the recorder or makes it spin.",
                ("call-fails", "any-call-fails", "few-descriptors"),
                ("tests/trace/test_writer_nth_call_fails.py",),
                shortfall="With about 28 MB of address space a recorder starts and may end early; "
                "the job goes on.",
            ),
        ),
    ),
    (
        "Collectors",
        (
            Promise(
                8,
                "A driver that hangs costs its own device only; the recorder ends within 2 s "
                "though a "
                "call still hangs.",
                ("driver-hangs",),
                ("tests/agent/isolation", "tests/scenarios/recording/test_lost_gpu.py"),
            ),
            Promise(
                9,
                "A driver that crashes its caller does not end the recorder; its device rests "
                "for 1, 2, "
                "4 … 60 s.",
                ("driver-crashes", "kill-helper"),
                ("tests/agent/isolation",),
            ),
            Promise(
                10,
                "A GPU that is lost, not supported or times out costs the other GPUs no sample.",
                ("device-lost",),
                ("tests/scenarios/recording/test_lost_gpu.py",),
            ),
            Promise(
                11,
                "A collector that raises anything is a gap with its reason; no other collector is "
                "affected.",
                tests=(
                    "tests/agent/sampling/test_scheduler.py",
                    "tests/agent/sampling/test_collector_runner.py",
                ),
            ),
            Promise(
                12,
                "A file system that hangs is never waited for by the thread that samples.",
                tests=(
                    "tests/agent/linux/test_reader_threads.py",
                    "tests/agent/linux/test_reader_threads_devices.py",
                    "tests/agent/collectors/test_network_filesystems.py",
                ),
                shortfall="The folder of the recording itself must not hang: frames are written by "
                "that thread.",
            ),
        ),
    ),
    (
        "The training process",
        (
            Promise(
                13,
                "The recorder may be killed, stopped, or have its files deleted: the job's "
                "result and "
                "exit status stay the same.",
                ("kill-recorder", "freeze-recorder", "run-dir-removed", "end-recorder"),
                ("tests/probe/test_ring.py", "tests/scenarios/training/test_torch_training.py"),
            ),
            Promise(
                14,
                "Whatever goes wrong while the probe loads, exit status, output and tracebacks "
                "are those "
                "of a run without it.",
                tests=(
                    "tests/probe/test_sitecustomize.py",
                    "tests/probe/test_sitecustomize_chaining.py",
                ),
            ),
            Promise(
                15,
                "Forks and workers do not hang; a worker that was seen loses no span. *A child "
                "that ends before the "
                "recorder has seen it, within a tenth of a second, takes its spans along.*",
                ("fork-storm", "kill-worker"),
                ("tests/probe/test_ring.py", "tests/probe/hooks/test_dataloader.py"),
            ),
            Promise(
                16,
                "A full or small `/dev/shm`, or a ring that others shorten, never kills the job.",
                ("shm-full", "run-dir-removed"),
                ("tests/agent/processes/test_span_rings.py",),
            ),
            Promise(
                17,
                "Exit codes, signals, pid, descriptors and output are those of the command alone.",
                ("exit-status", "stderr-lost"),
                ("tests/scenarios/recording/test_launch.py",),
            ),
            Promise(
                18,
                "The recorder is gone 2 s after the job, and knows how it ended.",
                ("kill-job", "driver-hangs"),
                (
                    "tests/scenarios/recording/test_launch.py",
                    "tests/agent/processes/test_registry.py",
                ),
            ),
            Promise(
                19,
                "A recorder that is asked to end (SIGTERM, SIGINT) writes its last frame and is "
                "gone "
                "within 2 s.",
                ("end-recorder",),
                ("tests/scenarios/recording/test_troubles.py",),
            ),
        ),
    ),
    (
        "Good neighbor",
        (
            Promise(
                20,
                "The recorder keeps to its budget of CPU time and halves its rate above it; the "
                "OOM "
                "killer takes it first.",
                ("crowd", "little-memory"),
                (
                    "tests/scenarios/recording/test_troubles.py",
                    "tests/agent/sampling/test_scheduler.py",
                ),
            ),
            Promise(
                21,
                "Each driver call takes at most 0.2 % of the time (GPM 0.5 %); expensive calls "
                "are made "
                "less often.",
                tests=("tests/agent/collectors/gpu/test_nvml_library.py",),
            ),
            Promise(
                22,
                "On SIGUSR2 the recorder closes its device handles within 2 s, and opens none "
                "until the next SIGUSR2; everything else is recorded.",
                ("device-release",),
                (
                    "tests/agent/sampling/test_device_release.py",
                    "tests/scenarios/recording/test_released_devices.py",
                ),
                shortfall="Not tried: a reset and a MIG change of a real GPU. A helper that the "
                "driver does not let go of keeps its handles, and is reported.",
            ),
            Promise(
                23,
                "A node with many processes costs no more: only the job's tree is read.",
                ("crowd",),
                ("tests/agent/linux/test_processes_many.py",),
            ),
        ),
    ),
    (
        "Truth",
        (
            Promise(
                24,
                "A value that was not measured is unknown, with its reason, and never zero.",
                ("driver-lies", "device-lost"),
                (
                    "tests/agent/sampling/test_collector_runner_reasons.py",
                    "tests/analysis/test_pipeline_missing_signals.py",
                ),
            ),
            Promise(
                25,
                "Counters that wrap, reset, stop or go back give a gap, never a negative or "
                "impossible "
                "rate.",
                ("driver-lies",),
                (
                    "tests/agent/linux/test_counters.py",
                    "tests/agent/collectors/test_rdma.py",
                    "tests/agent/collectors/test_network.py",
                ),
            ),
            Promise(
                26,
                "Steps of the wall clock change no time of a node; between nodes the printed "
                "bound of "
                "the clocks holds.",
                ("clock-step",),
                ("tests/analysis/timeline/test_clock_sync.py",),
            ),
            Promise(
                27,
                "A pid that is used again is another process.",
                tests=("tests/agent/processes/test_registry.py",),
            ),
            Promise(
                28,
                "What was lost is counted: finished = recorded + dropped, for each process.",
                ("kill-job", "freeze-recorder", "kill-worker"),
                ("tests/agent/processes/test_span_rings.py",),
            ),
        ),
    ),
    (
        "Readers",
        (
            Promise(
                29,
                "Mutated files end in records or a clear refusal, within 2 s of CPU and 256 MiB; "
                "mutated recordings within 20 s and 1 GiB for each command.",
                ("importers-fuzzed", "recording-damaged", "recording-forged"),
                ("tests/scenarios/fuzz/test_fuzzed.py",),
            ),
            Promise(
                30,
                "Files that unfold to gigabytes are refused before they do.",
                tests=(
                    "tests/analysis/importers/test_bombs.py",
                    "tests/trace/test_reader_damage.py",
                ),
            ),
            Promise(
                31,
                "10 GiB of traces of 64 ranks are read in at most 1 GiB of memory.",
                ("many-ranks", "many-ranks-large"),
            ),
            Promise(
                32,
                "A trace that ends anywhere gives its complete events, and is named incomplete.",
                ("importers-fuzzed",),
                ("tests/analysis/importers/kineto",),
            ),
            Promise(
                33,
                "Numbers that are none, endless nesting, bad text and unordered times have a "
                "defined "
                "outcome.",
                ("importers-fuzzed", "recording-forged"),
                ("tests/analysis/importers/test_long_and_sparse.py",),
            ),
            Promise(
                34,
                "Nothing in a file is executed: no pickle, no eval, no YAML tags, no shell. The "
                "check of style forbids the calls.",
                tests=(
                    "tests/config/test_yaml_file.py",
                    "tests/analysis/importers/nccl/test_flight_recorder.py",
                ),
            ),
            Promise(
                35,
                "Archives are read as streams and never unpacked to the disk.",
                tests=("tests/analysis/importers/test_bombs.py",),
            ),
        ),
    ),
    (
        "Output and gate",
        (
            Promise(
                36,
                "No name reaches a terminal as anything but text.",
                tests=(
                    "tests/scenarios/hostile/test_hostile_outputs.py",
                    "tests/scenarios/hostile/test_hostile_recording.py",
                ),
            ),
            Promise(
                37,
                "No name reaches an HTML report as anything but text; it asks for nothing from the "
                "network.",
                tests=(
                    "tests/scenarios/hostile/test_hostile_outputs.py",
                    "tests/output/renderers/html",
                ),
            ),
            Promise(
                38,
                "The same for JSON, CSV, Markdown and the commands of CI runners.",
                tests=(
                    "tests/output/renderers/test_hostile_reports.py",
                    "tests/scenarios/hostile/test_hostile_outputs.py",
                ),
            ),
            Promise(
                39,
                "A gate with too little, damaged or swapped input never passes.",
                tests=("tests/gate/test_never_passes.py", "tests/gate/test_judge.py"),
            ),
        ),
    ),
    (
        "Privilege and secrets",
        (
            Promise(
                40,
                "Files are readable by you alone; links, pipes and folders that others plant are "
                "not "
                "followed.",
                ("two-users", "planted-files"),
                ("tests/trace/test_segments.py", "tests/agent/launch/test_election.py"),
            ),
            Promise(
                41,
                "The recorder opens no listener and no connection.",
                ("sockets", "two-users"),
                ("tests/scenarios/recording/test_troubles.py",),
            ),
            Promise(
                42,
                "A recorder of root runs no code that the job or its folders name.",
                tests=("tests/scenarios/recording/test_troubles.py",),
                shortfall="Capabilities are not dropped.",
            ),
            Promise(
                43,
                "No command line and no environment enters a recording, but for the name of a "
                "Python process's script or module and the launcher's "
                "variables; `record --redact` leaves out names of hosts, users and paths.",
                ("secrets", "redacted"),
                ("tests/agent/sampling/test_redaction.py",),
            ),
            Promise(
                44,
                "A file of a recording that is changed or removed after the recorder closed it is "
                "named, and `gate` cannot tell.",
                ("recording-altered",),
                ("tests/trace/test_segments.py", "tests/gate/test_judge.py"),
                shortfall="Nothing is signed: sign `SHA256SUMS` after the job, or a person who "
                "can write to the recording changes that file too. The file that is open when a "
                "recorder is killed is not listed.",
            ),
            Promise(
                45,
                "Seven dependencies. What CI installs for a wheel and a release is pinned with "
                "hashes; a release is signed, has a list of its parts, and is uploaded without a "
                "token.",
                tests=("tests/test_supply_chain.py",),
                shortfall="Nothing is released yet: the workflow of releases was never run. Other "
                "jobs of CI install tools for tests unpinned.",
            ),
        ),
    ),
)
PROMISES = tuple(promise for _, promises in GROUPS for promise in promises)


def list_test_files() -> list[str]:
    """Return the tests that promises name, each once."""
    return list(dict.fromkeys(name for promise in PROMISES for name in promise.tests))
