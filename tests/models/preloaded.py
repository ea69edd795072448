"""Imports the models of transformers that the tests train, for ranks that start when it has been imported."""

import os

# Before the first import: nothing is downloaded.
os.environ["HF_HUB_OFFLINE"] = "1"

try:
    import transformers.distributed.tensor_parallel
    import transformers.models.gpt2.modeling_gpt2
    import transformers.models.llama.modeling_llama
    import transformers.models.mixtral.modeling_mixtral
    import transformers.models.qwen3.modeling_qwen3
    import transformers.models.qwen3_moe.modeling_qwen3_moe
    import transformers.models.t5.modeling_t5
    import transformers.models.vit.modeling_vit  # noqa: F401
except ImportError:
    # Tests that need transformers skip themselves.
    pass
