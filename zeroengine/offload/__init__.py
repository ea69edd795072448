"""Where a state lives when it is not in device memory: CPU memory or files on a disk, and the copies between them."""
