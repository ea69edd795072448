"""What a training run will take: bytes by state, activations, and the seconds of a step, before anything is allocated.

- ``model_facts``: a model on the meta device, from a function, a configuration of Hugging Face, or plain numbers.
- ``standard_decoder``: the model of plain numbers.
- ``activations``: memory and arithmetic of one micro-step, traced under fake tensors.
- ``machine``: the memory and the rates of the machines; ``machine_presets`` has those of common GPUs.
- ``measure``: the rates of this machine, measured.
- ``step_time``: the seconds of a step.
- ``state_bytes``: the bytes that a rank holds of every state, by the engine's own layout arithmetic.
- ``automatic``: the stage and the offload that ``initialize`` chooses, and what it refuses.
"""
