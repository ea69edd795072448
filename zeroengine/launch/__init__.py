"""Start the ranks of a run, and look after them until the last one has ended.

- ``local``: starts, watches, prints and ends the ranks of one node.
- ``cluster``: the nodes of a run, reached over ssh or srun.
- ``schedulers``: jobs under Slurm, MPI, Kubernetes and Ray.
"""
