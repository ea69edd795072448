"""The ranks of one node.

- ``job``: check a request and build the command and the environment of the ranks.
- ``agent``: run the ranks under a torch elastic agent.
- ``rendezvous``: what torch elastic must know about the run's nodes, and the store of all ranks.
- ``rank``: the process of one rank, and the outcome of a run.
- ``worker``: what a rank's process runs: the script, and a report of how it failed.
- ``guard``: the process that ends whatever a run leaves behind.
- ``signals``: which signals end a run, which are forwarded, and how handlers are set and restored.
- ``pipes``, ``console``: read the ranks' output, and print it.
- ``failure_report``: the text that is printed after a failure.
- ``core_binding``, ``network``, ``masking``: cores, addresses and secrets.
"""
