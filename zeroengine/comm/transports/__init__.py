"""The ways of moving bytes between ranks, one file each, behind the protocols of ``comm.interfaces``."""
