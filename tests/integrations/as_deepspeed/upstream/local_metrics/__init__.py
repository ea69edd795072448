"""Metrics in place of the hub's, which upstream's example scripts load by name. run.py puts them beside the tests."""
