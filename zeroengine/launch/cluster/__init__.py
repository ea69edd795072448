"""The nodes of a run, over ssh or srun.

- ``hosts``, ``environment``: which hosts take part, and which variables reach them.
- ``request``: the run that the user asks for, as messages.
- ``shells``, ``bootstrap``: how a command reaches a node, and the first program that runs there.
- ``protocol``: the messages between the launcher and its nodes.
- ``node_server``: the node's end of a connection.
- ``connections``, ``node_connection``, ``nodes``: the launcher's end: all pipes, one node, all nodes.
- ``preflight``, ``versions``: compare the nodes before anything is started.
- ``restart_loop``: run the ranks, and start them again after a failure.
- ``dry_run``: print a run instead of starting it.
"""
