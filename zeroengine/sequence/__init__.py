"""Long sequences: ranks that share a sample, losses in tiles, and activations in host memory.

- ``group``: the ranks that share a sample, and what they exchange.
- ``sequence_parallel``: attention over all tokens; ``mean_loss``: the mean of a loss over all of them.
- ``batches``: cuts a batch into the parts of the ranks.
- ``agreement``: compares inputs of all ranks, and what these ranks must have alike.
- ``model_check``: refuses a model that mixes tokens elsewhere than in attention.
- ``transformers_models``: connects models of transformers.
- ``tiled_loss``, ``tiled_mlp``: both in tiles of tokens; ``tiled_models``: switches them on in models of transformers.
- ``host_activations``: keeps the inputs of activation checkpoints in CPU memory between forward and backward.
"""
