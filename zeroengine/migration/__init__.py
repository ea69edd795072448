"""Names of DeepSpeed, DistributedDataParallel and FSDP that are not zeroengine's, and what to write instead.

They are no aliases: one thing has one name here. Whoever writes another library's name by habit is told this one's.
Needs no torch.
"""

from .messages import comm_attribute, engine_attribute, explains_arguments, module_attribute

__all__ = ["comm_attribute", "engine_attribute", "explains_arguments", "module_attribute"]
