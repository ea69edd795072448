"""Jobs under other launchers and schedulers.

- ``slurm``: the hosts of an allocation.
- ``mpi``: the environment of a rank that mpirun has started.
- ``kubernetes``: manifests for Kubeflow.
- ``ray``: ranks as workers of Ray Train.
"""
