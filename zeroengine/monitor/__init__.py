"""What a run tells: where the time and the memory of each step went.

Files:
    timer.py: Times the kinds of work of a step.
    record.py: The record of a step, the events of a run, and the protocol of a sink that takes both.
    run_folder.py: Writes both to a folder, as lines of JSON.
    collector.py: Collects the numbers of all ranks, without waiting, and feeds the sinks.
    summary.py: Makes the record of a step from the numbers of the ranks.
    metrics.py: Names the numbers of a record for loggers, as DeepSpeed does.
    sink_threads.py: Feeds each sink from a thread and a queue of its own.
    sinks/: Loggers and printers.
    flops.py, forward_profile.py, profile_table.py: Count and time a forward, by module.
    trace.py: Writes single steps as a timeline of all ranks.
"""
