"""One file per seam of a framework: what the probe wraps when the job imports that module.

A hook file has `install(module) -> bool`: wrap what is there, twice makes no difference, False or
an AttributeError when the seam is not where we know it.
"""

# (module to wait for, hook file); the position is the hook number of a hook_note
HOOKS = (
    ("torch.utils.data.dataloader", "dataloader"),
    ("torch", "optimizer"),
    ("torch.serialization", "checkpoint"),
    ("torch.distributed.checkpoint.state_dict_saver", "checkpoint"),
    ("torch.distributed.distributed_c10d", "distributed"),
    ("torch.nn.parallel.distributed", "ddp"),
    ("torch.distributed._functional_collectives", "functional"),
    ("torch._dynamo.callback", "compiling"),
)
