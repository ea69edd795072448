"""Which rank owns what: degrees, flat layouts, and how a model is cut into units. No communication.

These are the files to read first.
"""
