"""Small reports made by hand; every output is tested with all of them.

All of them keep the law: window = unmeasured + outside + in step, in step = productive + lost,
lost = causes + unattributed, per rank and in all.
"""

from __future__ import annotations

from clusterprof.report.impact import (
    DeviceUtilization,
    RankUtilization,
    UtilizationAdvice,
    UtilizationLevels,
)
from clusterprof.report.model import Advice as Remedy
from clusterprof.report.model import (
    Cause,
    CoverageGap,
    Culprit,
    Evidence,
    Finding,
    Metric,
    NodeFacts,
    RankLedger,
    Report,
)
from tests.support.cluster_report import make_cluster_report

S = 1_000_000_000

STORAGE = Cause(
    "storage-local",
    "storage",
    "The data path waits for a local disk",
    "Keep the dataset in memory or on a faster disk, or raise the number of workers so that more"
    " reads are outstanding at once.",
)
PREPROCESS = Cause(
    "cpu-preprocess",
    "cpu",
    "Preparing samples takes more CPU time than the job gives it",
    "Cache decoded samples, or raise num_workers while cores are idle.",
)
PACK = Remedy(
    "On rank 1: pack samples into large records and read these in order",
    "disk.read_size_bytes 16.0 KiB (a read asked for)",
    "tar --sort=name -cf shard-00000.tar -C DATA SAMPLES",
    "186.00 s of GPU time here if it mends all of it; published: up to 5x (CoorDL, VLDB 2021)",
    "clusterprof gate RUN --assert 'stall.storage-local_ratio <= 17.2%' (now 34.5 %)",
    "samples are shuffled within a buffer only",
    "pack-records",
)
READERS = Remedy(
    "On rank 1: raise num_workers from 4 to 7",
    "the rank may use 8 of 64 CPUs",
    "DataLoader(num_workers=7) in the place of num_workers=4",
    "186.00 s of GPU time here if it mends all of it",
    "clusterprof gate RUN --assert 'stall.storage-local_ratio <= 17.2%' (now 34.5 %)",
    "each worker needs memory",
    "more-readers",
)
STARTUP = Cause(
    "startup",
    "startup",
    "The first batch was awaited while workers started",
    "Use persistent_workers=True.",
)


def make_node(name: str = "node-a", damaged_bytes: int = 0, dropped_spans: int = 0) -> NodeFacts:
    return NodeFacts(
        name, f"{name}-0f1e2d3c-1", "0f1e2d3c", 310 * S, damaged_bytes, dropped_spans, 0.0042
    )


def make_storage_report() -> Report:
    """Two ranks, 300 s each; rank 1 waits more. The nanoseconds are odd so that sums show."""
    rank0 = RankLedger(
        "node-a",
        0,
        4711,
        "GPU-0f3c",
        "device-samples",
        300 * S,
        0,
        10 * S,
        290 * S,
        200 * S - 7,
        90 * S + 7,
        (("storage-local", 80 * S + 3), ("cpu-preprocess", 7 * S), ("unattributed", 3 * S + 4)),
        (("startup", 10 * S),),
        406,
        0.998,
    )
    rank1 = RankLedger(
        "node-a",
        1,
        4712,
        "GPU-9a77",
        "device-samples",
        300 * S,
        0,
        10 * S,
        290 * S,
        154 * S,
        136 * S,
        (("storage-local", 120 * S), ("cpu-preprocess", 14 * S), ("unattributed", 2 * S)),
        (("startup", 9 * S), ("unattributed", 1 * S)),
        406,
        0.997,
    )
    findings = (
        Finding(
            STORAGE,
            200 * S + 3,
            (200 * S + 3) / (580 * S),
            186 * S,
            0.95,
            "A",
            False,
            False,
            (Culprit("node-a", 1, "GPU-9a77", "vda"), Culprit("node-a", 0, "GPU-0f3c", "vda")),
            (
                Evidence("feeding.block_io_ratio", 0.912, "ratio", "of the fetch in block I/O"),
                Evidence("disk.read_bytes", 48.5 * 2**30, "bytes", "from vda"),
            ),
            advice=(PACK, READERS),
        ),
        Finding(
            PREPROCESS,
            21 * S,
            21 / 580,
            None,
            0.7,
            "B",
            False,
            False,
            (Culprit("node-a", 1, "GPU-9a77", "worker 1 (pid 4720)"),),
            (Evidence("feeding.user_cpu_ratio", 0.08, "ratio", "of the fetch on a CPU"),),
        ),
        Finding(
            STARTUP,
            19 * S,
            19 / 600,
            19 * S,
            0.9,
            "B",
            False,
            True,
            (Culprit("node-a", 0, "GPU-0f3c"), Culprit("node-a", 1, "GPU-9a77")),
            (),
        ),
    )
    metrics = (
        Metric("gpu.busy_ratio", (354 * S - 7) / (580 * S), "ratio"),
        Metric("stall.storage_ratio", (200 * S + 3) / (580 * S), "ratio"),
        Metric("step.p95_ns", 812_345_678.0, "ns"),
        Metric("gpu.sm_active_ratio", None, "ratio", "the driver offers no GPM on this GPU"),
    )
    coverage_gaps = (
        CoverageGap("gpu_nvidia: gpu.sm_active_ratio", "absent", "GPM is not supported", ""),
        CoverageGap(
            "mounts",
            "denied",
            "/proc/self/mountstats: permission denied",
            "run as the job's user or as root",
        ),
    )
    return Report(
        "runs/slow-disk",
        False,
        (make_node(),),
        (rank0, rank1),
        600 * S,
        0,
        20 * S,
        580 * S,
        354 * S - 7,
        226 * S + 7,
        findings,
        5 * S + 4,
        (
            ("blocked on something unseen (sleep, lock or socket)", 4 * S + 4),
            ("host launches work more slowly than the device", 1 * S),
        ),
        (("startup", 19 * S), ("unattributed", 1 * S)),
        metrics,
        coverage_gaps,
        ("Losses shorter than one device sample (100 ms) are spread over the waits around them.",),
    )


def make_clean_report() -> Report:
    """One rank whose loading is hidden behind compute: 0.4 s of 200 s lost, too little to find."""
    lost = 400_000_001
    rank = RankLedger(
        "node-a",
        None,
        812,
        "GPU-0f3c",
        "stream-events",
        201 * S,
        0,
        S,
        200 * S,
        200 * S - lost,
        lost,
        (("cpu-gc", 100_000_000), ("unattributed", lost - 100_000_000)),
        (("unattributed", S),),
        1000,
        1.0,
    )
    return Report(
        "runs/clean",
        False,
        (make_node(),),
        (rank,),
        201 * S,
        0,
        S,
        200 * S,
        200 * S - lost,
        lost,
        (),
        lost - 100_000_000,
        (("pieces too short to tell", lost - 100_000_000),),
        (("unattributed", S),),
        (Metric("gpu.busy_ratio", 0.998, "ratio"), Metric("stall.storage_ratio", 0.0, "ratio")),
        (),
    )


def make_upper_bound_report() -> Report:
    """No accelerator measured: 30 s of data waits in 100 s of steps is the most that was lost."""
    rank = RankLedger(
        "laptop",
        0,
        99,
        "",
        "host-spans",
        100 * S,
        0,
        0,
        100 * S,
        70 * S,
        30 * S,
        (("cpu-preprocess", 29 * S), ("unattributed", 1 * S)),
        (),
        250,
        1.0,
    )
    finding = Finding(
        PREPROCESS,
        29 * S,
        0.29,
        29 * S,
        0.9,
        "A",
        True,
        False,
        (Culprit("laptop", 0, "", "main thread"),),
        (Evidence("feeding.user_cpu_ratio", 0.97, "ratio"),),
    )
    return Report(
        "runs/laptop",
        False,
        (make_node("laptop"),),
        (rank,),
        100 * S,
        0,
        0,
        100 * S,
        70 * S,
        30 * S,
        (finding,),
        1 * S,
        (("fetch seen by no sample", 1 * S),),
        (),
        (
            Metric("gpu.busy_ratio", 0.70, "ratio", "", "at least"),
            Metric("stall.cpu_ratio", 0.29, "ratio", "", "at most"),
        ),
        (
            CoverageGap(
                "gpu_nvidia", "absent", "libnvidia-ml.so.1 was not found", "install the driver"
            ),
        ),
    )


def make_damaged_report() -> Report:
    """Damaged and emulated: 20 s of 120 s not measured, bytes unreadable, spans dropped."""
    rank = RankLedger(
        "node-b",
        0,
        77,
        "emulated-0",
        "device-samples",
        120 * S,
        20 * S,
        0,
        100 * S,
        60 * S,
        40 * S,
        (("storage-local", 30 * S), ("unattributed", 10 * S)),
        (),
        90,
        0.83,
    )
    finding = Finding(
        STORAGE, 30 * S, 0.3, 30 * S, 0.6, "C", False, False, (Culprit("node-b", 0, "emulated-0"),)
    )
    return Report(
        "runs/torn",
        True,
        (make_node("node-b", 123_456, 17),),
        (rank,),
        120 * S,
        20 * S,
        0,
        100 * S,
        60 * S,
        40 * S,
        (finding,),
        10 * S,
        (("the samples needed are missing", 10 * S),),
        (),
        (Metric("gpu.busy_ratio", 0.6, "ratio"), Metric("stall.storage_ratio", 0.3, "ratio")),
        (CoverageGap("000001.cpf", "lost", "123,456 bytes could not be read", ""),),
    )


def make_empty_report() -> Report:
    """A recording in which no training process was found."""
    return Report(
        "runs/empty",
        False,
        (make_node(),),
        (),
        0,
        0,
        0,
        0,
        0,
        0,
        (),
        0,
        (),
        (),
        (Metric("gpu.busy_ratio", None, "ratio", "no training process was found"),),
        (
            CoverageGap(
                "spans", "absent", "no process loaded the probe", "record with --inject auto"
            ),
        ),
    )


def make_underused_report() -> Report:
    """Two ranks of 100 s whose kernels fill three tenths of their devices; nearly nothing is lost.

    Each was busy for 99 s; rank 1 span for 1 s of it, and for 8 s its SM activity was not read.
    """
    ranks = tuple(
        RankLedger(
            "node-a",
            at,
            4711 + at,
            f"GPU-{at}",
            "device-samples",
            100 * S,
            0,
            0,
            100 * S,
            (99 - at) * S,
            (1 + at) * S,
            (("sync-imbalance", at * S), ("unattributed", S)),
            (),
            400,
            1.0,
        )
        for at in (0, 1)
    )
    levels = UtilizationLevels(0.3, 0.35, 0.12, 0.05, 0.2, 0.31, 21 << 30, 80 << 30, 0.95)
    codes = ("larger-batch", "fewer-launches")
    fills = (
        RankUtilization(
            "node-a",
            0,
            4711,
            "GPU-0",
            99 * S,
            0,
            29_700_000_003,
            69_299_999_997,
            0,
            (),
            levels,
            codes,
        ),
        RankUtilization(
            "node-a",
            1,
            4712,
            "GPU-1",
            99 * S,
            S,
            27 * S,
            63 * S,
            8 * S,
            (("no-reading", 8 * S),),
            levels,
            codes,
        ),
    )
    advice = (
        UtilizationAdvice("larger-batch", "Raise the batch size", True, 0.84, "B", 2),
        UtilizationAdvice("fewer-launches", "Launch less: torch.compile", True, 0.84, "B", 2),
    )
    utilization = DeviceUtilization(
        198 * S, S, 56_700_000_003, 132_299_999_997, 8 * S, (("no-reading", 8 * S),), fills, advice
    )
    metrics = (
        Metric("gpu.busy_ratio", 0.99, "ratio"),
        Metric("gpu.sm_active_ratio", 0.297, "ratio"),
        Metric("underfill.ratio", 0.7, "ratio"),
    )
    return Report(
        "runs/small-batch",
        False,
        (make_node(),),
        ranks,
        200 * S,
        0,
        0,
        200 * S,
        197 * S,
        3 * S,
        (),
        2 * S,
        (("no-signal", 2 * S),),
        (),
        metrics,
        (),
        device_utilization=utilization,
    )


ALL = {
    "storage": make_storage_report,
    "clean": make_clean_report,
    "upper-bound": make_upper_bound_report,
    "damaged-emulated": make_damaged_report,
    "nothing": make_empty_report,
    "underfilled": make_underused_report,
    "two-nodes": lambda: make_cluster_report(2, 2),
    "cluster": make_cluster_report,
}
