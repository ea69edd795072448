"""Helpers that several packages use and that belong to none of them."""
