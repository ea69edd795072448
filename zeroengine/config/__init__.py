"""Configuration: `load` checks a file or dict and returns a frozen `Config`, which `resolve` fits to a world size.

- `loading.py`: from a file, a dict or the environment to a checked `Config`.
- `model.py`: the whole configuration, and the models of the smaller sections.
- `zero.py`, `degrees.py`, `offload.py`: the models of what is partitioned, over how many ranks, and where it lives.
- `local_steps.py`: the model of replicas that are averaged now and then.
- `tensor_parallel.py`: the models of layers and of experts that are split over ranks.
- `ema.py`: the model of the moving average of the weights.
- `tiling.py`: the model of losses and MLPs in tiles.
- `precision.py`, `optimizers.py`, `schedulers.py`, `monitor.py`, `sinks.py`: the models of those sections.
- `fields.py`: types of fields, and `"auto"`.
- `batch.py`: the batch sizes, of which two give the third.
- `filling.py`: values of a framework in the place of `"auto"`.
- `source.py`: reading JSON, YAML and HJSON, with the line of every key of the first two.
- `deepspeed_keys.py`: DeepSpeed's keys that no model has, and what is said of each.
- `keys.py`: known key paths, and the nearest to an unknown one.
- `messages.py`: error messages.
- `reference.py`: the JSON Schema.
"""

from zeroengine.config.loading import ConfigLike, load
from zeroengine.config.model import Config
from zeroengine.config.precision import FLOATS, FP16

__all__ = ["FLOATS", "FP16", "Config", "ConfigLike", "load"]
