"""The ways to run an update, behind the protocols of ``interface``.

async_update       the fused rules, issued without waiting for the norm
blocking_update    waits for the norm, and then runs a rule for each algorithm:
fused_update       the fused rules; states may be offloaded. `fused_state` is their state
muon_update        Muon; its matrices are whole at their owners
average_update     the moving averages of the weights that no fused rule has updated
torch_update       any torch optimizer, on shards or on whole parameters at their owners
"""
