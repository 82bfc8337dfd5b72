"""Advice for lines: each known call by a stack that has it, and look-alikes that have none."""

from __future__ import annotations

import re

import pytest

from clusterprof.analysis.advice.base import format_line_in_function, strip_command_marks
from clusterprof.analysis.advice.code_lines import (
    KNOWN_CALLS,
    KnownCall,
    find_known_call,
    select_line_advice,
)
from clusterprof.analysis.advice.context import CodePath
from clusterprof.analysis.advice.registry import MAX_ADVICE, select_advice
from clusterprof.analysis.attribution.taxonomy import CAUSES
from clusterprof.report.code import CodeLocation
from clusterprof.report.model import EFFORTS, Culprit
from tests.support.advice_contexts import S, make_context, make_evidence

SITE = "/env/lib/python3.11/site-packages/"
STANDARD = "/env/lib/python3.11/"
MINE = CodeLocation("/job/data.py", 42, "Data.augment")

# id -> (cause, file, function) of stacks that are in the call
STACKS: dict[str, list[tuple[str, str, str]]] = {
    "resize-images-once": [
        ("cpu-preprocess", SITE + "PIL/Image.py", "Image.resize"),
        ("input-wait", "torchvision/transforms/_functional_pil.py", "resize"),
        ("cpu-preprocess", SITE + "torchvision/transforms/functional.py", "resized_crop"),
    ],
    "decode-images-cheaper": [
        ("cpu-preprocess", SITE + "PIL/ImageFile.py", "ImageFile.load"),
        ("cpu-preprocess", SITE + "PIL/JpegImagePlugin.py", "JpegImageFile.load_read"),
        ("cpu-preprocess", SITE + "torchvision/io/image.py", "decode_jpeg"),
    ],
    "use-opencv-lean": [
        ("cpu-preprocess", "<built-in>", "imdecode"),
        ("cpu-preprocess", SITE + "cv2/misc/version.py", "x"),
    ],
    "crop-before-augmenting": [
        ("cpu-preprocess", SITE + "albumentations/core/composition.py", "Compose.__call__")
    ],
    "use-transforms-v2": [
        ("cpu-preprocess", SITE + "torchvision/transforms/functional.py", "adjust_hue"),
        ("cpu-preprocess", "torchvision/transforms/_functional_pil.py", "adjust_brightness"),
    ],
    "save-snapshot-then-write": [
        ("checkpoint", SITE + "torch/serialization.py", "save"),
        ("eval-host", "torch/serialization.py", "_save"),
    ],
    "load-samples-mapped": [("storage-remote", SITE + "torch/serialization.py", "load")],
    "map-arrays": [
        ("cpu-preprocess", SITE + "numpy/lib/_npyio_impl.py", "load"),
        ("cpu", SITE + "numpy/lib/npyio.py", "load"),
    ],
    "read-whole-chunks": [("storage-local", SITE + "h5py/_hl/dataset.py", "Dataset.__getitem__")],
    "fetch-larger-objects": [
        ("storage-object", SITE + "botocore/httpsession.py", "send"),
        ("input-wait", SITE + "fsspec/caching.py", "ReadAheadCache._fetch"),
    ],
    "read-tables-once": [("cpu-preprocess", SITE + "pandas/io/parsers/readers.py", "read_csv")],
    "rows-as-arrays": [
        ("cpu-preprocess", SITE + "pandas/core/frame.py", "DataFrame.iterrows"),
        ("cpu-preprocess", SITE + "pandas/core/indexing.py", "_iLocIndexer._getitem_axis"),
    ],
    "send-arrays": [
        ("cpu-preprocess", STANDARD + "multiprocessing/queues.py", "Queue.get"),
        ("cpu-preprocess", STANDARD + "multiprocessing/connection.py", "_ConnectionBase.recv"),
    ],
    "tokenize-ahead": [
        ("cpu-preprocess", SITE + "transformers/tokenization_utils_fast.py", "_batch_encode_plus"),
        ("cpu-preprocess", SITE + "transformers/models/bert/tokenization_bert.py", "_tokenize"),
        ("cpu-preprocess", "<built-in>", "Tokenizer.encode_batch"),
    ],
    "parse-json-once": [
        ("cpu-preprocess", STANDARD + "json/decoder.py", "JSONDecoder.raw_decode"),
        ("input-wait", "json/__init__.py", "loads"),
    ],
    "draw-random-in-batches": [("cpu-preprocess", "<built-in>", "RandomState.normal")],
    "log-metrics-rarely": [("eval-host", SITE + "wandb/sdk/wandb_run.py", "Run.log")],
    "write-summaries-rarely": [
        ("eval-host", SITE + "torch/utils/tensorboard/writer.py", "SummaryWriter.add_scalar")
    ],
    "log-by-queue": [("eval-host", STANDARD + "logging/__init__.py", "StreamHandler.emit")],
    "plot-elsewhere": [("eval-host", SITE + "matplotlib/figure.py", "Figure.savefig")],
    "optimize-on-the-gpu": [
        ("h2d-sync", SITE + "torch/optim/adamw.py", "_single_tensor_adamw"),
        ("launch-bound", SITE + "deepspeed/ops/adam/cpu_adam.py", "DeepSpeedCPUAdam.step"),
    ],
    "read-back-rarely": [
        ("launch-bound", "<built-in>", "Tensor.item"),
        ("h2d-sync", "<built-in>", "torch._C.TensorBase.cpu"),
        ("eval-host", SITE + "torch/_tensor_str.py", "_tensor_str"),
    ],
    "print-rarely": [
        ("eval-host", "<built-in>", "print"),
        ("eval-host", SITE + "tqdm/std.py", "tqdm.refresh"),
    ],
    "ask-servers-elsewhere": [
        ("host-asleep", SITE + "requests/sessions.py", "Session.request"),
        ("eval-host", STANDARD + "http/client.py", "HTTPResponse.begin"),
    ],
    "no-sleep-in-steps": [("host-asleep", "<built-in>", "sleep")],
    "sync-files-rarely": [("eval-host", "<built-in>", "fsync")],
    "collect-rarely": [("cpu-gc", "<built-in>", "gc.collect")],
    "copy-tensors-only": [("eval-host", STANDARD + "copy.py", "deepcopy")],
    "start-no-processes": [
        ("eval-host", STANDARD + "subprocess.py", "Popen.__init__"),
        ("eval-host", "<built-in>", "_posixsubprocess.fork_exec"),
    ],
}
SOURCES = {
    "loss.item": ("launch-bound", "read-back-rarely"),
    "().cpu": ("eval-host", "read-back-rarely"),
    "print": ("eval-host", "print-rarely"),
    "time.sleep": ("host-asleep", "no-sleep-in-steps"),
    "os.fsync": ("eval-host", "sync-files-rarely"),
    "gc.collect": ("eval-host", "collect-rarely"),
    "os.system": ("eval-host", "start-no-processes"),
}


def path(*called: tuple[str, str], share: float = 0.5, samples: int = 100) -> CodePath:
    """A stack from the user's line on, given as files and functions."""
    frames = tuple(CodeLocation(file, 7, function) for file, function in called)
    return CodePath(MINE, frames, share, samples)


def known(cause: str, *called: tuple[str, str]) -> str | None:
    """The id of the known call of a stack."""
    call = find_known_call(path(*called), cause)
    return None if call is None else call.id


def test_every_known_call_has_an_example_stack() -> None:
    assert list(STACKS) == [call.id for call in KNOWN_CALLS]


@pytest.mark.parametrize("id_", STACKS)
def test_a_call_is_known_by_its_frame(id_: str) -> None:
    for cause, file, function in STACKS[id_]:
        assert known(cause, (file, function)) == id_
        below = (SITE + "numpy/core/fromnumeric.py", "mean")
        above = (SITE + "torchvision/datasets/folder.py", "pil_loader")
        assert known(cause, above, (file, function), below) == id_
        assert known("net-link", (file, function)) is None  # no code is behind that


@pytest.mark.parametrize(
    ("file", "function"),
    [
        ("/job/PIL_tools/Image.py", "resize"),
        (SITE + "myPIL/Image.py", "resize"),
        (SITE + "PIL/Image.py", "open"),
        (SITE + "simplejson/decoder.py", "decode"),
        (SITE + "pkg/json/decoder.py", "decode"),
        ("/job/json/loads.py", "loads"),
        (SITE + "torch/serialization.py", "_is_zipfile"),
        (SITE + "fsspec/implementations/local.py", "LocalFileOpener.read"),
        (SITE + "tqdm/std.py", "tqdm.__iter__"),
        (SITE + "mlflow/utils/autologging_utils/safety.py", "safe_patch_function"),
        (SITE + "torchvision/transforms/v2/_color.py", "transform"),
        (SITE + "deepcopy.py", "deepcopy"),
        (SITE + "scipy/copy.py", "deepcopy"),
        ("<built-in>", "Queue.item"),
        ("<built-in>", "sleepy"),
        ("<built-in>", "pprint"),
        ("<nvtx>", "resize"),
        ("<dftracer>", "print"),
    ],
)
def test_look_alike_frames_are_not_known_calls(file: str, function: str) -> None:
    for cause in CAUSES:
        assert known(cause, (file, function)) is None


def test_a_function_of_the_user_is_never_a_known_call() -> None:
    mine = CodePath(CodeLocation("/job/PIL/Image.py", 3, "resize"), (), 0.9, 100)
    assert find_known_call(mine, "cpu-preprocess") is None


def test_a_specific_known_call_takes_precedence_over_its_callees() -> None:
    wandb, requests = (SITE + "wandb/run.py", "log"), (SITE + "requests/api.py", "post")
    assert known("eval-host", wandb, requests) == "log-metrics-rarely"
    resize, load = (SITE + "PIL/Image.py", "resize"), (SITE + "PIL/ImageFile.py", "load")
    assert known("cpu-preprocess", resize, load) == "resize-images-once"
    reader, frame = (SITE + "pandas/io/common.py", "x"), (SITE + "pandas/core/frame.py", "x")
    assert known("cpu-preprocess", reader, frame) == "read-tables-once"


@pytest.mark.parametrize("call", SOURCES)
def test_built_in_functions_are_known_from_the_source_line(call: str) -> None:
    cause, id_ = SOURCES[call]
    own = CodePath(MINE, (), 0.5, 100, (call, "model"))
    known_call = find_known_call(own, cause)
    assert known_call is not None and known_call.id == id_
    other = (CodeLocation(SITE + "torch/nn/functional.py", 3, "linear"),)
    assert find_known_call(CodePath(MINE, other, 0.5, 100, (call,)), cause) is None
    assert find_known_call(CodePath(MINE, (), 0.5, 100, (call + "_all",)), cause) is None


@pytest.mark.parametrize(
    ("cause", "frame"),
    [
        ("storage-remote", (STANDARD + "json/__init__.py", "load")),
        ("storage-remote", (SITE + "numpy/lib/_npyio_impl.py", "load")),
        ("cpu-preprocess", (SITE + "numpy/lib/_npyio_impl.py", "NpzFile.__getitem__")),
    ],
)
def test_blocked_reads_and_compressed_arrays_match_no_known_call(
    cause: str, frame: tuple[str, str]
) -> None:
    assert known(cause, frame) is None


def test_two_known_calls_on_a_line_give_no_advice() -> None:
    own = CodePath(MINE, (), 0.5, 100, ("print", "loss.item"))
    assert find_known_call(own, "eval-host") is None


PREPARING = make_evidence(worker__on_cpu_ratio=0.8, loader__workers_count=4)
RESIZE = (SITE + "PIL/Image.py", "Image.resize")
LOAD = (SITE + "PIL/ImageFile.py", "ImageFile.load")


def test_advice_for_a_line_states_all_texts_and_numbers() -> None:
    """40 s are lost and can be had back; 71 % of them in resize, in 50 + 21 of 100 samples."""
    other = CodePath(CodeLocation("/job/model.py", 9, "forward"), (), 0.29, 29)
    more = CodePath(
        CodeLocation("/job/data.py", 50, "pad"),
        (CodeLocation(SITE + "PIL/Image.py", 1, "resize"),),
        0.21,
        21,
    )
    context = make_context(
        "cpu-preprocess", PREPARING, code=(path(RESIZE, samples=50), more, other)
    )
    (line,) = select_line_advice(context)
    advice = line.advice
    assert line.is_first and line.share_ratio == pytest.approx(0.71)
    assert advice.what == (
        "data.py:42 in Data.augment and 1 more spend 71 % in resize of images: store the images at"
        " the size that training needs"
    )
    assert advice.because == (
        "40.00 s of GPU time (40.0 % of the time in steps) was lost to it; 71 % of it passed"
        " through resize of images (71 samples)"
    )
    assert advice.gain.startswith("at most 28.40 s of GPU time here; published: 3x to 13x")
    assert advice.commands == ('image.draft("RGB", size)',) and "`" not in advice.change
    assert advice.verify.endswith(
        "data.py:42 in Data.augment has less of it in clusterprof analyze RUN --by line"
    )
    assert (advice.id, advice.effort, advice.diagnose) == ("resize-images-once", "data", False)


def ids(*paths: CodePath, cause: str = "cpu-preprocess", **changes: object) -> list[str]:
    """The ids of all advice."""
    context = make_context(cause, PREPARING, code=paths, **changes)
    return [advice.id for advice in select_advice(context)]


def test_a_line_with_a_quarter_of_the_loss_comes_first() -> None:
    general = ids()
    assert "prepare-ahead" in general and len(general) == 3
    first = ids(path(RESIZE, share=0.25))
    assert first[0] == "resize-images-once" and "prepare-ahead" not in first
    assert set(first[1:]) == set(general) - {"prepare-ahead"}
    assert ids(path(RESIZE, share=0.24)) == [*general, "resize-images-once"]
    assert ids(path(RESIZE, share=0.09)) == general
    assert ids(path(RESIZE, samples=7)) == general
    both = ids(path(LOAD, share=0.3), path(RESIZE, share=0.4))
    assert both[:2] == ["resize-images-once", "decode-images-cheaper"]
    assert len(both) <= MAX_ADVICE


def test_line_advice_comes_last_for_causes_outside_the_code() -> None:
    assert ids(path(RESIZE), cause="cpu-throttled")[-1] == "resize-images-once"
    assert ids(path(RESIZE), cause="cpu-throttled")[0] != "resize-images-once"


def test_line_advice_needs_lost_time_but_no_certain_cause() -> None:
    assert ids(path(RESIZE), confidence_ratio=0.1)[0] == "resize-images-once"
    assert ids(path(RESIZE), lost_ns=0) == []
    assert "resize-images-once" not in ids(path(RESIZE), step_ns=1000, steps=3)


def test_the_culprit_rank_is_named_before_the_line() -> None:
    culprit = Culprit("n7", 3, "", "", 40 * S, 40 * S, 0.9)
    context = make_context(
        "cpu-preprocess", PREPARING, code=(path(RESIZE),), ranks=8, nodes=2, culprits=(culprit,)
    )
    (line,) = select_line_advice(context)
    assert line.advice.what.startswith("On n7, rank 3: data.py:42 in Data.augment spends 50 % in ")


def test_a_place_is_formatted_as_file_line_and_function() -> None:
    assert format_line_in_function(CodeLocation("/job/data.py", 42, "f")) == "data.py:42 in f"
    assert format_line_in_function(CodeLocation("/job/data.py", 0, "f")) == "f in data.py"
    assert format_line_in_function(CodeLocation("<nvtx>", 0, "forward")) == "forward"


@pytest.mark.parametrize("call", KNOWN_CALLS, ids=lambda call: call.id)
def test_known_call_texts_and_patterns_are_well_formed(call: KnownCall) -> None:
    for text in (call.title, call.what, call.change, call.worse):
        assert text and not text.endswith(".") and "  " not in text
    assert call.change.count("`") % 2 == 0 and strip_command_marks(call.change)[1] == ()
    assert call.what[0].islower() and call.effort in EFFORTS
    assert set(call.causes) <= {*CAUSES}
    assert call.files or call.built_in or call.source
    for pattern in (call.files, call.built_in, call.source):
        re.compile(pattern)
