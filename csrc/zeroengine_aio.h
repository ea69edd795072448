/* The C interface of zeroengine's disk library.
 *
 * Plain C, free of torch and Python. A *transfer* moves one contiguous stretch of memory to or from one
 * contiguous stretch of a file; it is split into blocks, of which a queue keeps a number in flight. Threads of
 * the queue's own issue and complete them, so transfers proceed while nobody calls in.
 */
#ifndef ZEROENGINE_AIO_H
#define ZEROENGINE_AIO_H

#include <stdint.h>

#include "api.h"

#ifdef __cplusplus
extern "C" {
#endif

#define ZE_AIO_ABI_VERSION 1

/* io_uring, or pread and pwrite in a thread for each block in flight. Linux AIO (io_submit) is left out on purpose: on
 * an ext4 disk the threads read at 0.96 to 1.16 times its speed and write at 1.04 to 2.2 times, at depths 4 to 32 and
 * blocks of 256 KiB and 1 MiB (medians of 25 interleaved pairs each, in two runs on two busy cores). */
enum ze_aio_backend { ZE_AIO_AUTO = 0, ZE_AIO_IO_URING = 1, ZE_AIO_THREADS = 3 };

/* Direct I/O wants offsets, sizes and addresses to be multiples of this many bytes. Writes that are not go through the
 * page cache. */
#define ZE_AIO_ALIGNMENT 4096

/* `error` of a transfer that is no errno: the system moved nothing, at the end of the file say. */
#define ZE_AIO_NO_PROGRESS (-1)

struct ze_aio_queue;
struct ze_aio_transfer;

ZE_API int ze_aio_abi_version(void);

/* Returns 0 if a backend works on this machine, else -errno (-ENOSYS where it was not compiled). */
ZE_API int ze_aio_probe(int backend);

/* Opens a queue that keeps up to `depth` blocks of block_bytes, a multiple of ZE_AIO_ALIGNMENT, in flight.
 * ZE_AIO_AUTO takes the first backend that works. Returns 0 or -errno. A forked child must not use the queue: its
 * threads are the parent's. */
ZE_API int ze_aio_open(int backend, int depth, int64_t block_bytes, struct ze_aio_queue** queue);

/* Returns the backend in use. */
ZE_API int ze_aio_backend(const struct ze_aio_queue* queue);

/* Waits for every transfer and frees the queue. Its transfers stay, each until it is released. */
ZE_API void ze_aio_close(struct ze_aio_queue* queue);

/* Starts to read (if `write`, to write) `bytes` at `offset` of a file to (from) `address`. direct_fd is open with O_DIRECT,
 * or -1; fd is open on the same file without. Blocks that O_DIRECT refuses go through fd. Reads that are not aligned go
 * through depth * block_bytes of the queue's own memory. Memory and descriptors are in use until the transfer is done.
 * Transfers may overtake each other: of two that overlap the second waits for the caller to see the first done. Returns
 * NULL where there is no memory. */
ZE_API struct ze_aio_transfer* ze_aio_submit(struct ze_aio_queue* queue, int write, int fd, int direct_fd,
                                             void* address, int64_t bytes, int64_t offset);

struct ze_aio_result {
  int32_t error;        /* 0, an errno, or ZE_AIO_NO_PROGRESS: of the failed block that is first in the file */
  int32_t refused;      /* blocks that O_DIRECT refused with EINVAL */
  int64_t error_offset; /* where in the file that block failed */
};

/* Returns 1 once the transfer is done, with *result filled in; 0 where timeout_ms passed first. */
ZE_API int ze_aio_wait(struct ze_aio_transfer* transfer, int timeout_ms, struct ze_aio_result* result);

/* Frees the transfer; one that is under way goes on and is freed when it is done. */
ZE_API void ze_aio_release(struct ze_aio_transfer* transfer);

/* For tests: blocks number `first` to first + count - 1 of this process, counted from 1 from this call on,
 * fail. The environment variable ZEROENGINE_AIO_FAULT, read when the first queue is opened, does the
 * same: "short:3" or "5:1:2" are what:first or what:first:count. */
enum ze_aio_fault {
  ZE_AIO_FAULT_NONE = 0,
  ZE_AIO_FAULT_SHORT = -1, /* half of the block is moved */
  ZE_AIO_FAULT_EMPTY = -2, /* nothing is moved; every positive number is the errno that the block fails with */
};
ZE_API void ze_aio_set_fault(int what, int64_t first, int64_t count);

#ifdef __cplusplus
}
#endif

#endif
