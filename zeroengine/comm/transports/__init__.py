"""The ways of moving bytes between ranks, one file each, behind the protocols of ``comm.interfaces``.

- ``single_process``: one rank, where there is nothing to move.
- ``shared_memory``: CPU ranks of one host. ``shared_memory_file`` has the ranks' memory files, and
  ``shared_memory_channel`` the operations.
- ``gloo``: CPU ranks of several hosts.
- ``host_staged``: ranks on GPUs, through host memory.
- ``nccl``: ranks on GPUs, over NCCL.
- ``choose``: opens the fastest transport that all ranks can use.
"""
