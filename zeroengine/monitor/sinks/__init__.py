"""The loggers and printers that take the records of a run. One file for each.

Files:
    choose.py: Says which of them a configuration asks for.
    csv_files.py, tensorboard.py, wandb.py, comet.py: Loggers.
    step_printer.py: Prints the rate of training, the split of a step's time, and memory.
"""
