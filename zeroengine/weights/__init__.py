"""Weights in and out of checkpoints and live engines, as safetensors that Hugging Face reads and writes."""
