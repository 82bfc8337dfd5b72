"""Lightning, Hugging Face, DeepSpeed, Megatron: evaluations, saves, and steps of their own.

Their batches come from torch's loaders and their optimizer steps from torch's
optimizers, which other hooks record; this hook records only what the framework alone
knows. Functions are wrapped where they are defined: registering callbacks would change
the list that users see and pickle.
"""

from time import monotonic_ns
from types import ModuleType
from typing import Any, Dict, Tuple

from .. import annotations, layout
from . import outermost_calls, wrap

_EVAL, _SAVE, _STEP = "eval", "save", "step"
_SHARDED = "sharded save"  # written in parts by separate threads and processes
HookedFunction = Tuple[str, str, str]  # class ("" = none), function, role

_LIGHTNING_FUNCTIONS: Dict[str, Tuple[HookedFunction, ...]] = {
    "pytorch.loops.evaluation_loop": (("_EvaluationLoop", "run", _EVAL),),
    "pytorch.trainer.trainer": (("Trainer", "save_checkpoint", _SAVE),),
    "fabric.fabric": (("Fabric", "save", _SAVE),),
}
_FUNCTIONS: Dict[str, Tuple[HookedFunction, ...]] = {
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
    # ZeRO steps its optimizer once per parameter group, and a pipeline has no step().
    "deepspeed.runtime.engine": (
        ("DeepSpeedEngine", "_take_model_step", _STEP),
        ("DeepSpeedEngine", "save_checkpoint", _SAVE),
        ("DeepSpeedEngine", "save_16bit_model", _SAVE),
    ),
    "megatron.training.training": (("", "train_step", _STEP), ("", "evaluate", _EVAL)),
    "megatron.training.checkpointing": (("", "save_checkpoint", _SHARDED),),
    "megatron.core.dist_checkpointing.serialization": (("", "save", _SHARDED),),
}


def install(module: ModuleType) -> bool:
    """Wrap each function of the table that this version has; False when one is missing."""
    complete = True
    for owner_name, name, role in _get_functions(module.__name__):
        owner = getattr(module, owner_name, None) if owner_name else module
        if not hasattr(owner, name):
            complete = False
        elif role == _STEP:
            wrap.wrap_function(owner, name, _finish_framework_step, _begin_framework_step)
        elif role == _EVAL:
            outermost_calls.wrap_outermost(owner, name, layout.EVAL)
        else:
            outermost_calls.wrap_outermost(
                owner, name, layout.CHECKPOINT, _read_saved_file_size, by_parts=role == _SAVE
            )
    return complete


def _get_functions(module: str) -> Tuple[HookedFunction, ...]:
    name = module.replace("pytorch_lightning.", "lightning.pytorch.")
    name = name.replace("lightning_fabric.", "lightning.fabric.")
    if name.startswith("lightning."):
        return _LIGHTNING_FUNCTIONS[name[len("lightning.") :]]
    return _FUNCTIONS[name]


def _read_saved_file_size(arguments: Tuple[Any, ...], keywords: Dict[str, Any]) -> int:
    """Return the size of the file that is a save's first argument, -1 if it is not a file."""
    file_names = arguments[1:2] or tuple(
        [keywords[n] for n in ("filepath", "path") if n in keywords]
    )
    return outermost_calls.read_file_size(file_names[0]) if file_names else outermost_calls.UNKNOWN


def _begin_framework_step(*arguments: Any, **keywords: Any) -> None:
    annotations.begin_first_step(monotonic_ns())
    annotations.begin_framework_steps()


def _finish_framework_step(
    token: None, start: int, end: int, result: Any, *arguments: Any, **keywords: Any
) -> None:
    annotations.finish_framework_step(end)
