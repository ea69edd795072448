"""The ranks of one node: started, watched, printed, ended."""
