"""Starts the ranks.

- ``local``: the ranks of one node.
- ``cluster``: the nodes of a run, over ssh or srun.
- ``schedulers``: jobs under Slurm, MPI, Kubernetes and Ray.
"""
