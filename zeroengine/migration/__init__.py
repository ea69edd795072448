"""Names of DeepSpeed, DistributedDataParallel and FSDP that are not zeroengine's, and what to write instead.

They are no aliases: one thing has one name here. A user who writes another library's name by habit is told this one's.
Needs no torch.
"""
