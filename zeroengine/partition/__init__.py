"""Which rank owns what. Integer arithmetic without tensors or communication: the files to read first.

- ``degrees``: ZeRO stage -> over how many ranks each state is partitioned.
- ``cut``: model -> units, the groups of parameters that are gathered and released together.
- ``layout``: unit -> where each parameter lies in the flat buffer, and which rank owns it.
- ``boxes``: a run of a flattened tensor -> the boxes of the tensor that checkpoints store.
"""
