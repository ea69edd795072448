"""Which rank owns which elements. Integer arithmetic without communication: the files to read first.

- ``degrees``: ZeRO stage -> the number of ranks that each state is partitioned over.
- ``cut``: model -> units, the groups of parameters that are gathered and released together.
- ``layout``: unit -> where each parameter lies in the flat buffer, and which rank owns it.
- ``boxes``: a run of a flattened tensor -> the boxes of the tensor that checkpoints store.
"""
