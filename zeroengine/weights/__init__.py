"""Weights in and out of checkpoints and live engines, as safetensors and state dicts.

- `export`: a checkpoint's weights as safetensors. `chunked_reads`: reads its files in bounded memory.
- `live_weights`: the same out of a live engine. `live_loads`: into one. `own_code`: by the model's `load_state_dict()`.
- `sources`: the files and state dicts that it loads.
- `transformers_conversion`: between the layout of a transformers model and that of its files.
- `transfer`: a stream of weights to other processes, and the receivers there. `vllm_source`: for vLLM's own transfer.
- `huggingface_format`: sharded safetensors with an index. `output_folder`: a folder that appears as a whole.
"""
