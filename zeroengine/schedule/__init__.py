"""Which collective comes next on every rank: events in, actions out. It knows no tensor. In the order to read it:

- ``events`` and ``actions``: what the schedule learns, and what it decides.
- ``visits``: what each forward leaves, and the order of all collectives that follows from it; ``lists``, of experts.
- ``forwards``: gathers what modules need, and writes the log.
- ``backwards``: goes back through the log with a ``cursor``: gathers, releases, and says what may be reduced.
- ``residency``: what is gathered, with ``prefetch_order``; ``reduce_order``: what is reduced, with ``bucket_queue``.
- ``schedule``: ``handle(event)``, by which all of these learn what happens. Others read their state and change none.
"""
