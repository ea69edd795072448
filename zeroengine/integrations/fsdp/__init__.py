"""Turn the settings of FSDP2 (``fully_shard``) into a configuration.

Checkpoints that Distributed Checkpoint saved of an FSDP2 model need no function of this package:
``engine.load_checkpoint`` loads them, and FSDP2 loads those of ``engine.save_checkpoint``.
"""

from zeroengine.integrations.fsdp.policies import config_of_policies

__all__ = ["config_of_policies"]
