"""Summary and report in the trackers where a team looks: the real libraries, offline.

Each library is skipped where it is not installed (extra `[trackers]`; Lightning, Transformers).
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clusterprof import trackers
from clusterprof.analysis.pipeline import analyze
from clusterprof.errors import ClusterprofError, UsageError
from clusterprof.trackers import (
    build_summary,
    find_own_recording,
    log_report,
    parse_target,
    report_own_run,
)
from tests.support import reports
from tests.support.commands import make_environment, run_command
from tests.support.recording_runs import make_job_id

ROOT = Path(__file__).parents[1]
RECORDING = ROOT / "tests/recordings/h200/sleep"
S = 1_000_000_000


def test_the_summary_holds_known_values(tmp_path: Path) -> None:
    report = reports.make_storage_report()
    values = build_summary(report)
    assert values["clusterprof/lost_ratio"] == report.lost_ns / report.in_step_ns
    assert values["clusterprof/goodput_ratio"] == report.productive_ns / report.window_ns
    assert values["clusterprof/main_cause"] == "storage-local"
    by_cause = {
        name.rpartition("/")[2]: value for name, value in values.items() if "_by_cause/" in name
    }
    assert sum(map(float, by_cause.values())) == pytest.approx(report.lost_ns / S)
    assert values["clusterprof/lost_gpu_seconds"] == report.lost_ns / S


def test_the_summary_omits_unknown_values() -> None:
    values = build_summary(reports.make_empty_report())
    assert "clusterprof/lost_ratio" not in values and "clusterprof/main_cause" not in values
    report = replace(
        reports.make_clean_report(), window_ns=0, in_step_ns=0, productive_ns=0, lost_ns=0
    )
    assert build_summary(report) == {"clusterprof/gpu_seconds": 0.0}


def test_tracker_targets_are_parsed() -> None:
    assert parse_target("wandb") == ("wandb", "")
    assert parse_target("mlflow:abc") == ("mlflow", "abc")
    assert parse_target("tensorboard:/logs/a:b") == ("tensorboard", "/logs/a:b")
    with pytest.raises(UsageError, match="did you mean 'wandb'"):
        parse_target("wanb:x")


@pytest.mark.parametrize("name", ["mlflow", "tensorboard", "wandb"])
def test_a_missing_tracker_run_is_an_error_with_a_remedy(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name != "tensorboard":
        pytest.importorskip(name)
    for variable in ("WANDB_RUN_ID", "MLFLOW_RUN_ID"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(UsageError, match="named") as caught:
        log_report(reports.make_storage_report(), name)
    assert f"{name}:" in caught.value.remedy


def test_a_missing_tracker_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)  # as `import` sees a missing package
    with pytest.raises(UsageError, match="mlflow cannot be imported") as caught:
        log_report(reports.make_storage_report(), "mlflow:abc")
    assert "clusterprof[trackers]" in caught.value.remedy


# --- analyze --log-to ---


def test_tensorboard_gets_scalars_text_and_page(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    done = run_command("analyze", str(RECORDING), "--log-to", f"tensorboard:{tmp_path / 'logs'}")
    assert done.returncode == 0, done.stderr
    scalars, texts = read_events(tmp_path / "logs")
    check_summary({**scalars, **texts})
    assert "of GPU time inside steps was lost" in texts["clusterprof/report"]
    page = (tmp_path / "logs/clusterprof-report.html").read_text()
    assert page.startswith("<!doctype html>")


def read_events(folder: Path) -> tuple[dict[str, float], dict[str, str]]:
    """Read what TensorBoard itself would show."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    events = EventAccumulator(str(folder), {"tensors": 0})
    events.Reload()
    scalars, texts = {}, {}
    for name in events.Tags()["tensors"]:
        (event,) = events.Tensors(name)
        value = make_ndarray(event.tensor_proto)
        if value.dtype == object:
            texts[name] = value.item().decode()
        else:
            scalars[name] = float(value)
    return scalars, texts


def check_summary(values: dict[str, Any]) -> None:
    """Check a logged summary against the analysis; numbers may have been stored as float32."""
    expected = build_summary(analyze(RECORDING))
    assert len(expected) > 6
    for name, value in expected.items():
        if isinstance(value, str):
            assert values[name] == value
        else:
            assert values[name] == pytest.approx(value, rel=1e-6)


def test_mlflow_gets_metrics_tags_and_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    store = (tmp_path / "mlruns").as_uri()
    settings = {"MLFLOW_TRACKING_URI": store, "MLFLOW_ALLOW_FILE_STORE": "true"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    client = mlflow.MlflowClient(store)
    run = client.create_run(client.create_experiment("training"))
    target = f"mlflow:{run.info.run_id}"
    done = run_command("analyze", str(RECORDING), "--log-to", target, **settings)
    assert done.returncode == 0, done.stderr
    data = client.get_run(run.info.run_id).data
    tags = {name.replace(".", "/", 1): value for name, value in data.tags.items()}
    check_summary({**data.metrics, **tags})
    (path,) = (tmp_path / "mlruns").rglob("clusterprof/report.html")
    assert path.read_text().startswith("<!doctype html>")
    refused = run_command("analyze", str(RECORDING), "--log-to", "mlflow:" + "0" * 32, **settings)
    assert refused.returncode == 1 and "mlflow did not take the report" in refused.stderr
    assert "Traceback" not in refused.stderr and refused.stdout  # the report was printed first


def test_wandb_gets_summary_and_page(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    settings = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}
    done = run_command(
        *("analyze", str(RECORDING), "--log-to", "wandb:vision/run77"),
        cwd=tmp_path,
        **settings,
        PYTHONPATH=str(ROOT),
    )
    assert done.returncode == 0, done.stderr
    (folder,) = tmp_path.glob("wandb/offline-run-*-run77")
    check_summary(read_wandb_summary(folder))
    (page,) = folder.rglob("*.html")
    assert page.read_text().startswith("<!doctype html>")


def read_wandb_summary(folder: Path) -> dict[str, Any]:
    """Read the last summary in the log of an offline run, which `wandb sync` would send."""
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob("*.wandb")
    values = {}
    for data in read_log_records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        for item in record.summary.update:
            key = "/".join(item.nested_key) if item.nested_key else item.key
            values[key] = json.loads(item.value_json)
    return values


def read_log_records(data: bytes) -> Iterator[bytes]:
    """Read a log in the format of LevelDB: blocks of 32 KiB with parts of records.

    The first 7 bytes are a header of W&B. A part has a checksum, its length, and its kind: 1 = a
    whole record, 2 = the first part of one, 3 = a further one, 4 = the last one.
    """
    at, record = 7, b""
    while at + 7 <= len(data):
        room = 32768 - at % 32768
        if room < 7:
            at += room
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


# --- callbacks ---


def test_a_process_without_a_recording_reports_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CLUSTERPROF_RUN_DIR", raising=False)

    def fail() -> list[Any]:
        raise AssertionError("asked for runs")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report_own_run(fail, 1)
    assert find_own_recording({"CLUSTERPROF_RUN_DIR": str(tmp_path)}) is None


class Collector:
    """A tracker that keeps what it gets."""

    def __init__(self) -> None:
        self.summaries: list[trackers.RunSummary] = []

    def log(self, summary: trackers.RunSummary) -> None:
        self.summaries.append(summary)


class Refuser:
    def log(self, summary: trackers.RunSummary) -> None:
        raise OSError("no route to host")


def pretend_to_be_recorded(folder: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir.mkdir()
    (run_dir / "recording").write_bytes(os.fsencode(folder))
    monkeypatch.setenv("CLUSTERPROF_RUN_DIR", str(run_dir))


def test_a_failing_tracker_is_a_warning_and_the_others_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_to_be_recorded(RECORDING, tmp_path / "run", monkeypatch)
    kept = Collector()
    with pytest.warns(RuntimeWarning, match="not reported: no route to host"):
        report_own_run(lambda: [Refuser(), kept], 120)
    (summary,) = kept.summaries
    check_summary(dict(summary.values))
    assert summary.html.startswith("<!doctype html>") and summary.markdown


@pytest.mark.parametrize(
    ("patience_s", "message"), [(0.2, "took longer than 0.2 s"), (120, "the analysis failed")]
)
def test_an_analysis_that_fails_or_hangs_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patience_s: float, message: str
) -> None:
    folder = RECORDING if patience_s < 1 else tmp_path  # an empty folder has no recording
    pretend_to_be_recorded(folder, tmp_path / "run", monkeypatch)
    kept = Collector()
    with pytest.warns(RuntimeWarning, match=message):
        report_own_run(lambda: [kept], patience_s)
    assert kept.summaries == []


def record(script: str, folder: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run a training script under the recorder, with this interpreter."""
    (folder / "train.py").write_text(script)
    return subprocess.run(
        [
            *(sys.executable, "-m", "clusterprof", "record", "-o", "out", "--"),
            *(sys.executable, "train.py"),
        ],
        cwd=folder,
        env=make_environment(PYTHONPATH=str(ROOT), HF_HUB_OFFLINE="1", **settings),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


_ASK = """
import time
from clusterprof.trackers import find_own_recording
end = time.monotonic() + 20
while (folder := find_own_recording()) is None and time.monotonic() < end:
    time.sleep(0.05)
print(folder)
time.sleep(1.5)
"""


def test_a_recorded_process_finds_its_recording(tmp_path: Path) -> None:
    """The folder holds another job already, so that the recorder chooses one inside it."""
    first = record(_ASK, tmp_path)
    assert first.stdout.strip() == str(tmp_path / "out"), first.stderr
    name = make_job_id("tracker")
    settings = {"SLURM_JOB_ID": name, "SLURM_JOB_USER": "ada", "SLURM_JOB_ACCOUNT": "vision"}
    second = record(_ASK, tmp_path, **settings, SLURM_PROCID="0", SLURM_NTASKS="1")
    folder = Path(second.stdout.strip())
    assert folder == tmp_path / "out" / name, second.stderr
    job = analyze(folder).job
    assert job is not None
    assert (job.name, job.user, job.account) == (name, "ada", "vision")


_LIGHTNING = """
import torch
from torch.utils.data import DataLoader, TensorDataset
import lightning.pytorch as pl
from lightning.pytorch.loggers import TensorBoardLogger, CSVLogger
from clusterprof.trackers import make_lightning_callback

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(32, 1)
    def training_step(self, batch, index):
        return self.layer(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)

data = DataLoader(TensorDataset(torch.randn(4096, 32)), batch_size=16)
trainer = pl.Trainer(
    max_epochs=2, accelerator="cpu", enable_progress_bar=False, enable_checkpointing=False,
    logger=[TensorBoardLogger("logs"), CSVLogger("csv")], callbacks=[make_lightning_callback()],
)
trainer.fit(Net(), data)
print("trained", trainer.global_step)
"""


@pytest.mark.torch
def test_lightning_reports_into_its_loggers(tmp_path: Path) -> None:
    for name in ("lightning", "tensorboard", "torch"):
        pytest.importorskip(name)
    done = record(_LIGHTNING, tmp_path)
    assert done.returncode == 0 and "trained 512" in done.stdout, done.stderr
    (folder,) = (tmp_path / "logs/lightning_logs").glob("version_*")
    assert "not reported" not in done.stderr, done.stderr
    check_logs(folder)


def check_logs(folder: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (own,) = folder.glob("events.*.clusterprof")
    events = EventAccumulator(str(own), {"tensors": 0})
    events.Reload()
    names = set(events.Tags()["tensors"])
    assert {"clusterprof/lost_ratio", "clusterprof/goodput_ratio", "clusterprof/report"} <= names
    assert (folder / "clusterprof-report.html").read_text().startswith("<!doctype html>")


_TRANSFORMERS = """
import os
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
from clusterprof.trackers import make_transformers_callback

class Sentences(torch.utils.data.Dataset):
    def __len__(self):
        return 256
    def __getitem__(self, index):
        words = torch.arange(16) + index % 7
        return {"input_ids": words, "labels": torch.tensor(index % 2)}

config = BertConfig(
    vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
)
arguments = TrainingArguments(
    "checkpoints", num_train_epochs=2, per_device_train_batch_size=4, report_to=["REPORT"],
    save_strategy="no", logging_steps=16, use_cpu=True, disable_tqdm=True,
)
trainer = Trainer(BertForSequenceClassification(config), arguments, train_dataset=Sentences())
trainer.add_callback(make_transformers_callback())
trainer.train()
print("trained", trainer.state.global_step)
"""


@pytest.mark.torch
def test_transformers_reports_into_the_run_of_mlflow(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    for name in ("transformers", "accelerate", "torch"):
        pytest.importorskip(name)
    store = (tmp_path / "mlruns").as_uri()
    settings = {"MLFLOW_TRACKING_URI": store, "MLFLOW_ALLOW_FILE_STORE": "true"}
    done = record(_TRANSFORMERS.replace("REPORT", "mlflow"), tmp_path, **settings)
    assert done.returncode == 0 and "trained 128" in done.stdout, done.stderr
    assert "not reported" not in done.stderr, done.stderr
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    client = mlflow.MlflowClient(store)
    (run,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
    assert 0 <= run.data.metrics["clusterprof/lost_ratio"] <= 1
    assert "train_loss" in run.data.metrics  # the run that Transformers itself had opened
    assert len(list((tmp_path / "mlruns").rglob("clusterprof/report.html"))) == 1


@pytest.mark.torch
def test_transformers_reports_into_the_run_of_wandb(tmp_path: Path) -> None:
    for name in ("wandb", "transformers", "accelerate", "torch"):
        pytest.importorskip(name)
    settings = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_RUN_ID": "run78"}
    done = record(_TRANSFORMERS.replace("REPORT", "wandb"), tmp_path, **settings)
    assert done.returncode == 0 and "trained 128" in done.stdout, done.stderr
    assert "not reported" not in done.stderr, done.stderr
    (folder,) = tmp_path.glob("wandb/offline-run-*-run78")  # one run, which training had opened
    summary = read_wandb_summary(folder)
    assert 0 <= summary["clusterprof/lost_ratio"] <= 1
    assert "train/global_step" in summary
    (page,) = folder.rglob("*.html")
    assert page.read_text().startswith("<!doctype html>")


@pytest.mark.torch
def test_transformers_reports_into_its_log_directory(tmp_path: Path) -> None:
    for name in ("transformers", "accelerate", "tensorboard", "torch"):
        pytest.importorskip(name)
    logs = tmp_path / "logs"
    done = record(
        _TRANSFORMERS.replace("REPORT", "tensorboard"), tmp_path, TENSORBOARD_LOGGING_DIR=str(logs)
    )
    assert done.returncode == 0 and "trained 128" in done.stdout, done.stderr
    assert "not reported" not in done.stderr, done.stderr
    check_logs(logs)


@pytest.mark.torch
def test_callbacks_do_nothing_without_a_recording(tmp_path: Path) -> None:
    for name in ("lightning", "tensorboard", "torch"):
        pytest.importorskip(name)
    (tmp_path / "train.py").write_text(_LIGHTNING)
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "train.py"],
        cwd=tmp_path,
        env=make_environment(PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0 and "trained 512" in done.stdout, done.stderr
    assert not list(tmp_path.rglob("*clusterprof*"))


def test_a_tracker_error_becomes_a_clusterprof_error() -> None:
    message = "wandb did not take the report: ValueError: no"
    with pytest.raises(ClusterprofError, match=message), trackers._convert_tracker_errors("wandb"):
        raise ValueError("no")
