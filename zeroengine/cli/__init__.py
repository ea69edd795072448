"""The ``zero-*`` commands."""
