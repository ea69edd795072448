"""The Engine and what only the Engine uses.

- ``initialize``: makes an engine from a model and a configuration, after checks that change nothing.
- ``parts``, ``reports``, ``assembly``: build the parts of an engine, as records of which each needs those before it.
- ``engine``: the Engine itself, whose methods call its parts.
- ``call_checks``: checks of the arguments of public calls, and of where these calls come.
- ``step_loop``: one step, from its first backward to the counters, with what follows.
- ``observers``: what observes a step, in order. ``monitor/observer.py`` has the moments.
- ``model_forwards``: which forwards are those of a step.
- ``accumulation``: counts micro-steps, and decides which call may end a step.
- ``clipping``: the largest norm of the gradient.
- ``step``: takes a step from reduced gradients, steps the LR schedule, and counts.
- ``replica_rounds``: the rounds of ``local_steps``.
- ``checkpointing``: the work before and after a save or a load of checkpoints and weights.
- ``restoration``: makes the model ordinary again when an engine ends or ``initialize`` fails.
- ``ending``: replaces the parts of an engine that has ended.
- ``parameter_access``, ``gathered``: whole values of partitioned states for the user.
- ``average_weights``: lets the model compute with the moving averages of its weights.
- ``memory``: reports the bytes that each state holds, and explains out-of-memory errors.
- ``temporary_offload``: moves states off the device on request, and back.
- ``dataloader``: a data loader whose position is part of checkpoints.
- ``foreign_parameters``: finds parameters that the engine would silently leave untrained.
"""
