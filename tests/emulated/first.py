"""Imported before torch, where processes are to have the emulated GPU."""

from tests.emulated import load, wanted

if wanted() == "emulated":
    load()
