"""Names of DeepSpeed, DistributedDataParallel and FSDP that zeroengine does not have, and what to write instead.

They are not aliases: one thing has one name here. A user who writes another library's name by habit gets an error that
says what to write. Nothing here needs torch.

- `names.py`: the tables.
- `messages.py`: the messages of the errors.
- `launch_options.py`: options of other launchers.
"""
