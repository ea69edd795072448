"""The seconds of a step: the rates of machines, and what a step moves and computes."""
