"""One file per hooked framework module: the functions that the probe wraps when the job imports it.

A hook file has `install(module) -> bool`: wrap the functions of the module, with no
effect when repeated; False or an AttributeError when they are not where expected.
"""

# (module to wait for, hook file); the position is the hook number in a hook_note
HOOKS = (
    ("torch.utils.data.dataloader", "dataloader"),
    ("torch", "optimizer"),
    ("torch.serialization", "checkpoint"),
    ("torch.distributed.checkpoint.state_dict_saver", "checkpoint"),
    ("torch.distributed.distributed_c10d", "distributed"),
    ("torch.nn.parallel.distributed", "ddp"),
    ("torch.distributed._functional_collectives", "functional_collectives"),
    ("torch._dynamo.callback", "compiling"),
    ("torchdata.stateful_dataloader.worker", "dataloader"),
    ("torchdata.stateful_dataloader.stateful_dataloader", "dataloader"),
    ("safetensors.torch", "checkpoint"),
    ("lightning.pytorch.loops.evaluation_loop", "frameworks"),
    ("lightning.pytorch.trainer.trainer", "frameworks"),
    ("lightning.fabric.fabric", "frameworks"),
    ("pytorch_lightning.loops.evaluation_loop", "frameworks"),
    ("pytorch_lightning.trainer.trainer", "frameworks"),
    ("lightning_fabric.fabric", "frameworks"),
    ("transformers.trainer", "frameworks"),
    ("accelerate.accelerator", "frameworks"),
    ("deepspeed.runtime.engine", "frameworks"),
    ("megatron.training.training", "frameworks"),
    ("megatron.training.checkpointing", "frameworks"),
    ("megatron.core.dist_checkpointing.serialization", "frameworks"),
    ("spdl.pipeline._pipeline", "non_torch_loaders"),
    ("nvidia.dali.plugin.pytorch", "non_torch_loaders"),
    ("nvidia.dali.plugin.jax.iterator", "non_torch_loaders"),
    ("tensorflow.python.data.ops.iterator_ops", "non_torch_loaders"),
    ("jax._src.monitoring", "jax_compiling"),
    ("torch", "queues"),
    ("jax._src.monitoring", "queues"),
    ("multiprocessing.queues", "queues"),
)
