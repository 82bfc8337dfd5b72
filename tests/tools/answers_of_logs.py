"""Published answers in logs, tables and metrics, next to the results of our importers.

Each function yields (data, file, what, stated, by, ours, met) for tests/tools/import_answers.py.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from clusterprof.analysis.importers.core.base import Account, Importer
from clusterprof.analysis.importers.core.byte_sources import open_sources
from clusterprof.analysis.importers.core.node_tables import NodeTables
from clusterprof.analysis.importers.kineto.importer import Kineto
from clusterprof.analysis.importers.metrics.labeled_series import find_mapping
from clusterprof.analysis.importers.metrics.nvidia_smi import NvidiaSmi
from clusterprof.analysis.importers.metrics.prometheus import Prometheus, parse_labels
from clusterprof.analysis.importers.nccl.text_logs import read_text
from clusterprof.analysis.importers.nsys.importer import Nsys
from clusterprof.analysis.importers.workloads.dlio import Dlio
from clusterprof.analysis.importers.workloads.mllog import Mllog
from clusterprof.analysis.pipeline import analyze
from clusterprof.probe import layout
from tests.support.import_results import read_span_table

Answer = tuple[str, str, str, str, str, str, bool]
DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"
_FIELDS = (
    ("memory used", "fb_used", "gpu.memory_used_bytes", 1 << 20),
    ("SM clock", "sm", "gpu.sm_clock_hertz", 10**6),
    ("power", "power", "gpu.power_watts", 1),
)


def iterate_answers() -> Iterator[Answer]:
    """Yield all of them."""
    for each in (
        check_mlperf_logs,
        check_mlperf_startup,
        check_dlio_sample,
        check_nccl_tests,
        check_nvidia_smi,
        check_prometheus_answers,
        check_node_exporter,
        list_files_without_answer,
    ):
        yield from each()


def _load_known(folder: str) -> Any:
    return json.loads((DATA / folder / "known.json").read_text())


def _import(importer: Importer, *paths: Path) -> tuple[list[NodeTables], list[Account]]:
    sources = [source for path in paths for source in open_sources(path)]
    accounts = [Account(source.path, importer.title) for source in sources]
    return list(importer.nodes(sources, accounts)), accounts


def _list_spans(node: NodeTables, pid: int, kind: int) -> Any:
    """Spans of a kind: fields by row."""
    table = read_span_table(node._spans[pid])
    return table[:, table[2] == kind]


def _measure_seconds(spans: Any) -> float:
    return float((spans[1] - spans[0]).sum()) / 1e9


def check_mlperf_logs() -> Iterator[Answer]:
    """Epochs or blocks of every log; who is slow, and who began with cold caches."""
    folder = DATA / "mllog"
    paths = sorted(folder.glob("*/result_*.txt.gz"))
    nodes, accounts = _import(Mllog(), *paths)
    known, cold, slow = _load_known("mllog")["logs"], dict[str, int](), dict[str, list[str]]()
    for path, node, account in zip(paths, nodes, accounts):
        file = f"{path.parent.name}/{path.name.removesuffix('.gz')}"
        length = known[file].get("epoch_s") or known[file]["block_s"]
        ours = _measure_seconds(_list_spans(node, 1, layout.STEP))
        what = "epochs, in all" if "epoch_s" in known[file] else "blocks, in all"
        yield (
            "mllog",
            file,
            what,
            f"{length['sum']:,.1f} s",
            "its lines",
            f"{ours:,.1f} s",
            abs(ours - length["sum"]) < 0.05,
        )
        of, notes = path.parent.name, account.notes
        cold[of] = cold.get(of, 0) + any("cold caches" in note for note in notes)
        named = path.name.split(".")[0].removeprefix("result_")
        slow.setdefault(of, []).extend([named] * any("the slowest of" in note for note in notes))
    for of, stated in (("perlmutter_cosmoflow_weak", 10), ("clemson_deepcam", 0)):
        yield (
            "mllog",
            of,
            "logs whose first epoch was slow",
            str(stated),
            "verdict",
            str(cold[of]),
            cold[of] == stated,
        )
    of = "perlmutter_cosmoflow_weak"
    yield ("mllog", of, "the slow instance", "3", "verdict", ", ".join(slow[of]), slow[of] == ["3"])


def check_mlperf_startup() -> Iterator[Answer]:
    """How long each MLPerf log goes until its first epoch or block begins, by its own lines."""
    for path in sorted((DATA / "mllog").glob("*/result_*.txt.gz")):
        lines = gzip.decompress(path.read_bytes()).decode().splitlines()
        values = [json.loads(line.split(":::MLLOG", 1)[1]) for line in lines if ":::MLLOG" in line]
        first = {
            key: at for key, at in ((entry["key"], entry["time_ms"]) for entry in reversed(values))
        }
        begins = first["epoch_start"] if "epoch_start" in first else first["block_start"]
        stated = (begins - min(value["time_ms"] for value in values)) / 1e3
        ours = dict(analyze(path).outside_buckets).get("startup", 0) / 1e9
        name = f"{path.parent.name}/{path.name.removesuffix('.gz')}"
        yield (
            "mllog",
            name,
            "start-up, until the first of them",
            f"{stated:,.1f} s",
            "its lines",
            f"{ours:,.1f} s",
            abs(ours - stated) < 0.05,
        )


def check_dlio_sample() -> Iterator[Answer]:
    """What DLIO's own test of its post-processing expects: of the first two of four epochs."""
    folder = DATA / "dlio-sample"
    (node,), _ = _import(Dlio(), *sorted(folder.glob("[01]_output.json")))
    stated = _load_known("dlio-sample")["stated_by_source"]["tests/dlio_postprocessor_test.py"]
    half = [_list_spans(node, pid, layout.STEP)[3].max() // 2 for pid in (1, 2)]
    for what, kind, key in (
        ("loading, two epochs, mean of ranks", layout.DATA_WAIT, "avg_process_loading_time"),
        ("steps, two epochs, mean of ranks", layout.STEP, "avg_process_processing_time"),
    ):
        values = [_list_spans(node, pid, kind) for pid in (1, 2)]
        ours = sum(_measure_seconds(s[:, s[3] <= most]) for s, most in zip(values, half)) / 2
        yield (
            "dlio-sample",
            "all",
            what,
            f"{stated[key]} s",
            "DLIO's own test",
            f"{ours:.2f} s",
            f"{ours:.2f}" == stated[key],
        )


def check_nccl_tests() -> Iterator[Answer]:
    """The largest row of each table."""
    for name, file in _load_known("nccl-tests")["files"].items():
        log = read_text(iter((DATA / "nccl-tests" / name).read_bytes().splitlines()))
        last, stated = log.rows[-1], file["largest"]
        ours = (len(log.rows), last.bytes, last.time_us, last.bus_gbps)
        known = (file["rows"], stated["bytes"], stated["time_us"], stated["busbw"])
        form = "{} rows, {:,} B in {:,.0f} us, bus {} GB/s"
        yield (
            "nccl-tests",
            name,
            "rows, the largest",
            form.format(*known),
            "the table",
            form.format(*ours),
            ours == known,
        )


def check_nvidia_smi() -> Iterator[Answer]:
    """Some fields of each document."""
    for name, file in _load_known("nvidia-smi-xml")["files"].items():
        (node,), _ = _import(NvidiaSmi(), DATA / "nvidia-smi-xml" / name)
        (gpu,) = file["gpus"]
        for what, key, signal, scale in _FIELDS:
            if gpu[key] is None:
                continue
            selected = [column for column in node._columns if column.signal == signal]
            ours = f"{selected[0].values[0] / scale:g}" if selected else "not known"
            stated = gpu[key].split()[0]
            yield (
                "nvidia-smi-xml",
                name,
                what,
                gpu[key],
                "the document",
                f"{ours} {gpu[key].split()[1]}",
                ours == f"{float(stated):g}",
            )


def check_prometheus_answers() -> Iterator[Answer]:
    """Every value of the API's answers."""
    folder = "dcgm-prometheus/h100_eks_2026-03"
    signals = {"GPU_UTIL": 0.01, "FB_USED": 1 << 20, "GPU_TEMP": 1, "POWER_USAGE": 1}
    for name, file in _load_known(folder)["files"].items():
        nodes, _ = _import(Prometheus(), DATA / folder / name)
        columns = [column for node in nodes for column in node._columns]
        if "values" not in file:
            yield (
                "dcgm-prometheus",
                name,
                "series",
                str(file["series"]),
                "the file",
                str(len(columns)),
                len(columns) == file["series"],
            )
            continue
        scale = next(scale for word, scale in signals.items() if word in name)
        ours = sorted(float(column.values[0]) for column in columns)
        stated = sorted(float(value) * scale for value in file["values"].values())
        met = len(ours) == len(stated) and bool(np.allclose(ours, stated, rtol=1e-12))
        alike = sum(a == b or abs(a - b) < 1e-9 * abs(b) for a, b in zip(ours, stated))
        yield (
            "dcgm-prometheus",
            name,
            "values",
            str(len(stated)),
            "the answer",
            f"{alike} of {len(ours)} alike",
            met,
        )


def check_node_exporter() -> Iterator[Answer]:
    """Of the values that the exporter must print those that are a signal of ours by themselves."""
    file = "expected-e2e-output.txt.gz"
    path = DATA / "node-exporter-fixtures" / file
    nodes, _ = _import(Prometheus(), path)
    ours = {(c.signal, c.device): float(c.values[0]) for node in nodes for c in node._columns}
    count = alike = 0
    listed = set(_load_known("node-exporter-fixtures")["expected_lines"])
    for line in gzip.decompress(path.read_bytes()).decode().splitlines():
        if line not in listed:
            continue
        name, _, value = line.rpartition(" ")
        mapping = find_mapping(name.partition("{")[0], parse_labels(name.partition("{")[2]))
        if mapping is None or mapping[0].parts:
            continue
        count += 1
        stated = float(value) * mapping[0].scale
        alike += abs(ours.get((mapping[0].signal, mapping[1]), -1.0) - stated) <= 1e-9 * stated
    yield (
        "node-exporter-fixtures",
        file,
        "values that are signals of ours",
        str(count),
        "node_exporter",
        f"{alike} alike",
        alike == count,
    )


def list_files_without_answer() -> Iterator[Answer]:
    """List files without a published answer: whether they are read to their end, and what they
    hold."""
    for folder, item in (("kineto-hta", Kineto()), ("nsys-sqlite", Nsys())):
        known = {name.removesuffix(".gz") for name in _load_known(folder)["traces"]}
        for path in sorted((DATA / folder).glob("*.gz")):
            if path.name.removesuffix(".gz") in known:
                continue
            _, (account,) = _import(item, path)
            gave = ", ".join(f"{n:,} {what}" for what, n in account.read.items() if n)
            yield (folder, path.name, "read to its end", "no answer", "-", gave, not account.cut)
