"""Lightning, Hugging Face, DeepSpeed, Megatron: evaluations, saves, and steps of their own.

Their batches come out of torch's loaders and their steps are those of torch's optimizers, which
other hooks mark; what is here is what only the framework knows. Functions are wrapped where they
are defined: callbacks would change the list that users see and pickle.
"""

from time import monotonic_ns
from types import ModuleType
from typing import Any, Dict, Tuple

from .. import layout, steps
from . import marks, seam

_EVAL, _SAVE, _STEP = "eval", "save", "step"
_SHARDED = "sharded save"  # written by threads and processes of its own, in part
Seam = Tuple[str, str, str]  # class (or none), function, what it is

_LIGHTNING: Dict[str, Tuple[Seam, ...]] = {
    "pytorch.loops.evaluation_loop": (("_EvaluationLoop", "run", _EVAL),),
    "pytorch.trainer.trainer": (("Trainer", "save_checkpoint", _SAVE),),
    "fabric.fabric": (("Fabric", "save", _SAVE),),
}
_SEAMS: Dict[str, Tuple[Seam, ...]] = {
    "transformers.trainer": (
        ("Trainer", "evaluate", _EVAL),
        ("Trainer", "predict", _EVAL),
        ("Trainer", "_save_checkpoint", _SAVE),
        ("Trainer", "save_model", _SAVE),
    ),
    "accelerate.accelerator": (
        ("Accelerator", "save_state", _SAVE),
        ("Accelerator", "save_model", _SAVE),
    ),
    # ZeRO steps its optimizer once for each group of parameters, and a pipeline has no step().
    "deepspeed.runtime.engine": (
        ("DeepSpeedEngine", "_take_model_step", _STEP),
        ("DeepSpeedEngine", "save_checkpoint", _SAVE),
        ("DeepSpeedEngine", "save_16bit_model", _SAVE),
    ),
    "megatron.training.training": (
        ("", "train_step", _STEP),
        ("", "evaluate", _EVAL),
    ),
    "megatron.training.checkpointing": (("", "save_checkpoint", _SHARDED),),
    "megatron.core.dist_checkpointing.serialization": (("", "save", _SHARDED),),
}


def install(module: ModuleType) -> bool:
    """Wrap each function of the table that this version has; False when one is not there."""
    found = True
    for owner_name, name, what in _seams_of(module.__name__):
        owner = getattr(module, owner_name, None) if owner_name else module
        if not hasattr(owner, name):
            found = False
        elif what == _STEP:
            seam.wrap(owner, name, _stepped, _begins)
        elif what == _EVAL:
            marks.wrap(owner, name, layout.EVAL)
        else:
            marks.wrap(owner, name, layout.CHECKPOINT, _size_of_file, by_parts=what == _SAVE)
    return found


def _seams_of(module: str) -> Tuple[Seam, ...]:
    name = module.replace("pytorch_lightning.", "lightning.pytorch.")
    name = name.replace("lightning_fabric.", "lightning.fabric.")
    if name.startswith("lightning."):
        return _LIGHTNING[name[len("lightning.") :]]
    return _SEAMS[name]


def _size_of_file(arguments: Tuple[Any, ...], keywords: Dict[str, Any]) -> int:
    """Return the bytes of the file that is a save's first argument, if that is one."""
    named = arguments[1:2] or tuple([keywords[n] for n in ("filepath", "path") if n in keywords])
    return marks.file_size(named[0]) if named else marks.UNKNOWN


def _begins(*arguments: Any, **keywords: Any) -> None:
    steps.saw(monotonic_ns())
    steps.framework_begins()


def _stepped(
    token: None, start: int, end: int, result: Any, *arguments: Any, **keywords: Any
) -> None:
    steps.framework_stepped(end)
