"""Snapshots of the states in the memory of hosts, from which ranks that are started again resume.

- `snapshots`: takes them beside training, and finds the newest that is whole on the hosts that are left.
- `generations`: which hosts keep copies for which, and which snapshot is whole. Pure functions.
- `newest`: chooses between snapshots and the checkpoints on the disk.
- `server`: files of a snapshot between hosts, over TCP.
"""
