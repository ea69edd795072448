"""Checkpoints of DeepSpeed: read them and import them."""
