"""``deepspeed.runtime.torch_autocast``: in which dtype parameters are communicated under torch.autocast.

Here that is the parameters' own dtype, which is that of autocast where they have no fp32 masters.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from zeroengine.integrations.parameter_engines import engines_of

# The attribute in which DeepSpeed keeps the dtype of a parameter; zeroengine never sets it.
PARAM_COMM_DTYPE_ATTR_NAME = "comm_dtype"


def has_comm_dtype(param: torch.nn.Parameter) -> bool:
    """Return whether a parameter is communicated in the dtype of autocast."""
    in_autocast = any(engine.config.autocast_dtype is param.dtype for engine in engines_of([param]))
    return in_autocast or hasattr(param, PARAM_COMM_DTYPE_ATTR_NAME)


def get_comm_dtype(param: torch.nn.Parameter) -> torch.dtype:
    """Return the dtype in which a parameter is gathered."""
    dtype: torch.dtype = getattr(param, PARAM_COMM_DTYPE_ATTR_NAME, param.dtype)
    return dtype


def get_all_comm_dtypes(params: Iterable[torch.nn.Parameter]) -> set[torch.dtype]:
    """Return the dtypes in which parameters are gathered."""
    return {get_comm_dtype(param) for param in params}


def sort_dtypes(dtypes: Iterable[torch.dtype]) -> list[torch.dtype]:
    """Return dtypes in the order of their names."""
    return sorted(dtypes, key=str)


def get_allgather_dtype(param: torch.nn.Parameter, param_ds_tensor: object = None) -> torch.dtype:
    """Return the dtype in which a parameter is gathered."""
    return get_comm_dtype(param)
