"""Takes all that was imported so far out of the garbage collector's sight, when it is imported.

A process that is forked later would else write to, and so copy, every page of these modules at its first collection.
"""

import gc

gc.collect()
gc.freeze()
