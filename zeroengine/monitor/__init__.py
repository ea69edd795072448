"""What a run tells: where the time and the memory of each step went.

Files:
    timer.py: Times the kinds of work of a step.
    record.py: The record of a step, the events of a run, and the protocol of a sink that takes both.
    run_folder.py: Writes both to a folder, as lines of JSON.
    collector.py: Collects the numbers of all ranks, without waiting, and feeds the sinks.
    trace.py: Writes single steps as a timeline of all ranks.
"""
