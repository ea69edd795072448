"""The sharded optimizer with its update backends, loss scaling, and learning-rate schedules.

sharded_optimizer    the torch optimizer over shards, which chooses a backend and delegates to it
backends/            three ways to run an update, behind one protocol
optimizer_shard      one unit's parameters, masters and gradients on this rank
gradient_norm        the norm over all ranks, and the first gradient that is not finite
step_result          the settings and the result of one step
segments             the runs of a shard that one kernel call can update
factory              the base optimizer that the caller or the configuration asks for
caller_optimizer     what the calls of the caller's own optimizer object do
lion                 Lion as a torch optimizer
loss_scaler          static and dynamic loss scales
lr_schedules         learning-rate schedules by name
"""
