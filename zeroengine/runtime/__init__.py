"""ZeRO itself: the storage of a unit, the gatherer of parameters, and the reducer of gradients."""
