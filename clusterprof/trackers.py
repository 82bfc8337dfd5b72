"""Send what an analysis found to the experiment tracker where the team looks at its runs.

    clusterprof analyze RUN --log-to wandb:PROJECT/RUN_ID       # or mlflow:RUN_ID, tensorboard:DIR

    from clusterprof.trackers import make_lightning_callback    # or make_transformers_callback
    trainer = Trainer(callbacks=[make_lightning_callback()])

The callbacks report into the run that the job itself has opened, once, when training ends. Without
a recording they do nothing. The analysis runs in a process of its own, at low priority and with a
limit of time: whatever goes wrong is a warning, and the job goes on.

What is not known is left out, never 0. The trackers are imported when they are used (extra
`[trackers]`); this module needs none of them.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from clusterprof.errors import ClusterprofError, UsageError

if TYPE_CHECKING:
    from clusterprof.report.model import Report

PREFIX = "clusterprof"
"""First part of the name of everything that is sent."""
TRACKERS = ("wandb", "mlflow", "tensorboard")
PATIENCE_S = 120.0
"""Time for which a callback waits for the analysis, seconds: a job of hours is worth two minutes.
"""
_SETTLE_S = 2.0  # a recorder writes every second
_RUN_DIR_VARIABLE = "CLUSTERPROF_RUN_DIR"
_FOLDER_FILE = "recording"
_HTML_NAME = f"{PREFIX}-report.html"
_SUMMARY_FILE, _REPORT_FILE, _TEXT_FILE = "summary.json", "report.html", "report.md"

Summary = Mapping[str, "float | str"]


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What is sent to a tracker."""

    values: Summary
    """Name -> number or text; what is not known is not in it."""
    html: str
    """The report as an HTML page."""
    markdown: str
    """The report as Markdown, for trackers that show no HTML."""


class Tracker(Protocol):
    """A run of a tracker."""

    def log(self, summary: RunSummary) -> None:
        """Send a summary to the run."""
        ...


def build_summary(report: Report) -> dict[str, float | str]:
    """Build the numbers that a tracker shows beside those of the run.

    Ratios are 0 to 1, times in device seconds. Goodput is the productive part of the time for which
    devices were held.
    """
    values: dict[str, float | str] = {f"{PREFIX}/gpu_seconds": report.window_ns / 1e9}
    if report.window_ns:
        values[f"{PREFIX}/goodput_ratio"] = report.productive_ns / report.window_ns
    if report.too_little_seen:
        values[f"{PREFIX}/not_judged"] = report.too_little_seen
    if not report.in_step_ns:
        return values
    values[f"{PREFIX}/lost_ratio"] = report.lost_ns / report.in_step_ns
    values[f"{PREFIX}/lost_gpu_seconds"] = report.lost_ns / 1e9
    lost: dict[str, int] = {}
    for ledger in report.ledgers:
        for cause, ns in ledger.buckets:
            lost[cause] = lost.get(cause, 0) + ns
    for cause, ns in sorted(lost.items()):
        if ns:
            values[f"{PREFIX}/lost_gpu_seconds_by_cause/{cause}"] = ns / 1e9
    main = report.main_cause
    if main is not None:
        values[f"{PREFIX}/main_cause"] = main.cause.id
        values[f"{PREFIX}/main_cause_ratio"] = main.lost_ns / report.in_step_ns
        values[f"{PREFIX}/main_cause_confidence_ratio"] = main.confidence_ratio
    return values


def summarize_report(report: Report) -> RunSummary:
    """Summarize a report for trackers."""
    from clusterprof.output.renderers.base import load_renderer

    html, markdown = (load_renderer(name)().render(report) for name in ("html", "markdown"))
    return RunSummary(build_summary(report), html, markdown)


# --- the trackers ---


def parse_target(text: str) -> tuple[str, str]:
    """Parse the value of `--log-to` to the tracker and where in it; "" = the run that is open.

    Raises: UsageError for an unknown tracker.
    """
    name, _, where = text.partition(":")
    if name not in TRACKERS:
        from clusterprof.config import format_suggestion

        raise UsageError(
            f"--log-to {text!r}: unknown tracker{format_suggestion(name, TRACKERS)}",
            "write wandb:PROJECT/RUN_ID, mlflow:RUN_ID or tensorboard:DIR",
        )
    return name, where


def log_report(report: Report, target: str) -> None:
    """Send the summary of a report to a run of a tracker.

    target: as after `--log-to`. Raises: UsageError when the tracker is not installed, or no run is
    named; ClusterprofError when it refuses.
    """
    name, where = parse_target(target)
    summary = summarize_report(report)
    with _convert_tracker_errors(name), _OPENERS[name](where) as tracker:
        tracker.log(summary)


@contextmanager
def _convert_tracker_errors(name: str) -> Iterator[None]:
    """Convert whatever a tracker raises to an error that says what to do."""
    try:
        yield
    except ClusterprofError:
        raise
    except ImportError as error:
        raise UsageError(
            f"{name} cannot be imported: {error}", "pip install 'clusterprof[trackers]'"
        ) from None
    except Exception as error:
        raise ClusterprofError(
            f"{name} did not take the report: {type(error).__name__}: {error}",
            f"check that the run exists and that {name} may write to it",
        ) from None


class WandbRun:
    """A run of Weights & Biases."""

    def __init__(self, run: Any) -> None:
        """Take an open run."""
        self._run = run

    def log(self, summary: RunSummary) -> None:
        """Update the run's summary, and log the page as HTML."""
        wandb = importlib.import_module("wandb")
        self._run.summary.update(dict(summary.values))
        page = wandb.Html(io.StringIO(summary.html), inject=False)
        self._run.log({f"{PREFIX}/report": page})


class MlflowRun:
    """A run of MLflow."""

    def __init__(self, client: Any, run_id: str) -> None:
        """Take a client and the id of a run, which may have ended."""
        self._client, self._run_id = client, run_id

    def log(self, summary: RunSummary) -> None:
        """Log numbers as metrics, texts as tags, and the page as an artifact."""
        for name, value in summary.values.items():
            if isinstance(value, str):
                self._client.set_tag(self._run_id, name.replace("/", "."), value)
            else:
                self._client.log_metric(self._run_id, name, value)
        self._client.log_text(self._run_id, summary.html, f"{PREFIX}/report.html")


class TensorboardFolder:
    """A log directory of TensorBoard."""

    def __init__(self, folder: Path) -> None:
        """Take the folder with the event files of a run."""
        self._folder = folder

    def log(self, summary: RunSummary) -> None:
        """Write scalars and the report as text into an event file, and the page beside it."""
        writer = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        event = importlib.import_module("tensorboard.compat.proto.event_pb2").Event
        make_scalar = importlib.import_module("tensorboard.plugins.scalar.summary_v2").scalar_pb
        make_text = importlib.import_module("tensorboard.plugins.text.summary_v2").text_pb
        events = writer.EventFileWriter(str(self._folder), filename_suffix=f".{PREFIX}")
        try:
            for name, value in summary.values.items():
                make = make_text if isinstance(value, str) else make_scalar
                events.add_event(event(wall_time=time.time(), step=0, summary=make(name, value)))
            text = make_text(f"{PREFIX}/report", summary.markdown)
            events.add_event(event(wall_time=time.time(), step=0, summary=text))
        finally:
            events.close()
        (self._folder / _HTML_NAME).write_text(summary.html, encoding="ascii")


@contextmanager
def _open_wandb(where: str) -> Iterator[Tracker]:
    """Open a run of W&B: ENTITY/PROJECT/RUN, PROJECT/RUN, RUN, or the one of the environment."""
    wandb = importlib.import_module("wandb")
    if not where and wandb.run is not None:
        yield WandbRun(wandb.run)
        return
    words = where.split("/") if where else []
    if len(words) > 3 or not all(words) or (not words and not os.environ.get("WANDB_RUN_ID")):
        raise UsageError(
            "--log-to wandb: no run is named" if not where else f"{where!r} is no run of wandb",
            "write wandb:PROJECT/RUN_ID, wandb:ENTITY/PROJECT/RUN_ID, or set WANDB_RUN_ID",
        )
    *place, run_id = words or [os.environ["WANDB_RUN_ID"]]
    names = dict(zip(("project", "entity"), reversed(place)))
    run = wandb.init(id=run_id, resume="allow", **names)
    try:
        yield WandbRun(run)
    finally:
        run.finish()


@contextmanager
def _open_mlflow(where: str) -> Iterator[Tracker]:
    """Open a run of MLflow by its id, or the one that is active or named by the environment."""
    mlflow = importlib.import_module("mlflow")
    active = None if where else mlflow.active_run()
    run_id = where or (active.info.run_id if active else os.environ.get("MLFLOW_RUN_ID", ""))
    if not run_id:
        raise UsageError(
            "--log-to mlflow: no run is named", "write mlflow:RUN_ID, or set MLFLOW_RUN_ID"
        )
    yield MlflowRun(mlflow.MlflowClient(), run_id)


@contextmanager
def _open_tensorboard(where: str) -> Iterator[Tracker]:
    """Open a log directory; it is created where there is none."""
    if not where:
        raise UsageError(
            "--log-to tensorboard: no folder is named", "write tensorboard:LOG_DIRECTORY"
        )
    folder = Path(where)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{where}: {(error.strerror or str(error)).lower()}") from None
    yield TensorboardFolder(folder)


_OPENERS: Mapping[str, Callable[[str], Any]] = {
    "wandb": _open_wandb,
    "mlflow": _open_mlflow,
    "tensorboard": _open_tensorboard,
}


# --- callbacks ---


def find_own_recording(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Find the folder into which this process is recorded; None when it is not recorded."""
    run_dir = environ.get(_RUN_DIR_VARIABLE)
    if not run_dir:
        return None
    try:
        folder = Path(os.fsdecode((Path(run_dir) / _FOLDER_FILE).read_bytes()))
    except OSError:
        return None
    return folder if folder.is_dir() else None


def make_lightning_callback(patience_s: float = PATIENCE_S) -> Any:
    """Make a callback for the Trainer of Lightning that reports into its loggers.

    patience_s: time to wait for the analysis when training ends, seconds.
    Raises: ImportError without Lightning.
    """
    names = ("lightning.pytorch", "pytorch_lightning")
    name = next((name for name in names if name in sys.modules), names[0])
    base: Any = importlib.import_module(name).Callback

    class ClusterprofCallback(base):  # type: ignore[misc]
        """Reports once, on the first rank, when fitting ends."""

        def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
            """Report what was lost; called after loggers have saved, also when fitting failed."""
            if stage == "fit" and trainer.is_global_zero:
                report_own_run(lambda: list(_list_lightning_runs(trainer.loggers)), patience_s)

    return ClusterprofCallback()


def make_transformers_callback(patience_s: float = PATIENCE_S) -> Any:
    """Make a callback for the Trainer of Transformers that reports into the runs that are open.

    patience_s: time to wait for the analysis when training ends, seconds.
    Raises: ImportError without Transformers.
    """
    base: Any = importlib.import_module("transformers").TrainerCallback

    class ClusterprofCallback(base):  # type: ignore[misc]
        """Reports once, on the first process, when training ends."""

        def __init__(self) -> None:
            self._runs: list[Tracker] = []

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Note the open runs once: MLflow's own callback may close its run before ours."""
            if state.global_step == 1 and state.is_world_process_zero and not self._runs:
                with _warn_of_errors():
                    self._runs = list(_list_open_runs(_find_log_folder(args)))

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Report what was lost."""
            if state.is_world_process_zero:
                report_own_run(lambda: self._runs, patience_s)

    return ClusterprofCallback()


def report_own_run(list_runs: Callable[[], Sequence[Tracker]], patience_s: float) -> None:
    """Analyze the recording of this process as it is now, and send the result to some runs.

    Does nothing without a recording or without a run. Errors become warnings.
    """
    with _warn_of_errors():
        folder = find_own_recording()
        runs = list_runs() if folder is not None else ()
        if folder is None or not runs:
            return
        summary = _analyze_elsewhere(folder, patience_s)
        for run in runs:
            with _warn_of_errors():
                run.log(summary)


@contextmanager
def _warn_of_errors() -> Iterator[None]:
    """Turn every error into a warning: the training job comes first."""
    try:
        yield
    except Exception as error:
        warnings.warn(
            f"clusterprof: the run was not reported: {error or type(error).__name__}",
            RuntimeWarning,
            stacklevel=3,
        )


def _analyze_elsewhere(folder: Path, patience_s: float) -> RunSummary:
    """Analyze a recording in another process.

    Raises: ClusterprofError when it fails or takes too long.
    """
    code = (
        "import sys; from clusterprof import trackers; trackers.write_summary_files(*sys.argv[1:])"
    )
    package = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    environment = {
        **os.environ,
        "CLUSTERPROF_DISABLE": "1",  # it is no process of the job
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": path,
    }
    with tempfile.TemporaryDirectory(prefix="clusterprof-report-") as out:
        try:
            done = subprocess.run(
                [sys.executable, "-c", code, str(folder), out],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=patience_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ClusterprofError(
                f"the analysis took longer than {patience_s:g} s; run: clusterprof analyze {folder}"
            ) from None
        if done.returncode != 0:
            lines = done.stderr.decode(errors="replace").strip().splitlines()
            raise ClusterprofError(f"the analysis failed: {lines[-1] if lines else 'no message'}")
        texts = [(Path(out) / name).read_text("utf-8") for name in (_REPORT_FILE, _TEXT_FILE)]
        return RunSummary(json.loads((Path(out) / _SUMMARY_FILE).read_text("utf-8")), *texts)


def write_summary_files(folder: str, out: str) -> None:
    """Analyze a recording at low priority, and write its summary and its pages into a folder.

    Raises: as `clusterprof.analysis.pipeline.analyze`.
    """
    os.nice(10)
    time.sleep(_SETTLE_S)
    from clusterprof.analysis.pipeline import analyze

    summary = summarize_report(analyze(folder, history=True))
    (Path(out) / _SUMMARY_FILE).write_text(json.dumps(dict(summary.values)), encoding="utf-8")
    (Path(out) / _REPORT_FILE).write_text(summary.html, encoding="utf-8")
    (Path(out) / _TEXT_FILE).write_text(summary.markdown, encoding="utf-8")


def _list_lightning_runs(loggers: Sequence[Any]) -> Iterator[Tracker]:
    """List the runs behind the loggers of Lightning, recognized by their class."""
    for logger in loggers:
        kinds = {kind.__name__ for kind in type(logger).__mro__}
        if "WandbLogger" in kinds:
            yield WandbRun(logger.experiment)
        elif "MLFlowLogger" in kinds:
            yield MlflowRun(logger.experiment, logger.run_id)
        elif "TensorBoardLogger" in kinds:
            yield TensorboardFolder(Path(logger.log_dir))


def _list_open_runs(log_folder: Path | None) -> Iterator[Tracker]:
    """List the runs that this process has open, of those trackers that it has imported."""
    wandb, mlflow = (sys.modules.get(name) for name in ("wandb", "mlflow"))
    if wandb is not None and getattr(wandb, "run", None) is not None:
        yield WandbRun(wandb.run)
    if mlflow is not None and mlflow.active_run() is not None:
        yield MlflowRun(mlflow.MlflowClient(), mlflow.active_run().info.run_id)
    if log_folder is not None:
        yield TensorboardFolder(log_folder)


def _find_log_folder(args: Any) -> Path | None:
    """Find the log directory of TensorBoard in the arguments of Transformers; None without one."""
    report_to = getattr(args, "report_to", None) or ()
    folder = getattr(args, "logging_dir", None) or os.environ.get("TENSORBOARD_LOGGING_DIR")
    if "tensorboard" not in report_to or not folder or not Path(folder).is_dir():
        return None
    return Path(folder)
