"""Models that are built without memory and given their values unit by unit in ``initialize``."""
