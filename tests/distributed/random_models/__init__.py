"""Random models, and random ways to train them, from a seed: see `recipe`, and `features`, which draws recipes."""
