"""The sharded optimizer with its update backends, loss scaling, and learning-rate schedules.

sharded_optimizer    the torch optimizer over shards, whose step is the engine's
backends/            three ways to run an update, behind one protocol
choice               chooses one of them
algorithms           what updates each parameter, and how precise its moments are
fused_rules          the optimizers that the fused kernels update, and their settings
optimizer_shard      one unit's parameters, masters and gradients on this rank
step_reduction       the collective of a step: the norm and the flags over all ranks
step_result          the settings and the result of one step
segments             the runs of a shard that one kernel call can update
factory              the base optimizer that the caller or the configuration asks for
caller_optimizer     redirects the calls of the caller's own optimizer to the engine
lion                 Lion as a torch optimizer
loss_scaler          static and dynamic loss scales
lr_schedules         learning-rate schedules by name
"""
