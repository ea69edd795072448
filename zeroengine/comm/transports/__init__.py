"""The ways of moving bytes between ranks, one file each, behind the protocols of ``comm.interfaces``.

``choose`` lists them, and opens the fastest one that all ranks can use. Each says in its first lines which ranks it is
for.
"""
