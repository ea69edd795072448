/* The C interface of zeroengine's disk library.
 *
 * Plain C, free of torch and Python. A *transfer* moves one contiguous stretch of memory to or from one
 * contiguous stretch of a file; it is split into blocks, of which a queue keeps a number in flight. Threads of
 * the queue's own issue and complete them, so transfers get on while nobody calls in.
 */
#ifndef ZEROENGINE_AIO_H
#define ZEROENGINE_AIO_H

#include <stdint.h>

#include "api.h"

#ifdef __cplusplus
extern "C" {
#endif

#define ZE_AIO_ABI_VERSION 1

/* io_uring; Linux AIO's io_submit; pread and pwrite in a thread for each block in flight. */
enum ze_aio_backend { ZE_AIO_AUTO = 0, ZE_AIO_IO_URING = 1, ZE_AIO_LIBAIO = 2, ZE_AIO_THREADS = 3 };

/* What direct I/O wants offsets, sizes and addresses to be multiples of. Blocks that are not go through the
 * page cache. */
#define ZE_AIO_ALIGNMENT 4096

/* `error` of a transfer that is no errno: the system moved nothing, at the end of the file say. */
#define ZE_AIO_NO_PROGRESS (-1)

struct ze_aio_queue;
struct ze_aio_transfer;

ZE_API int ze_aio_abi_version(void);

/* Whether this machine has a backend: 0 or -errno (-ENOSYS where it was not compiled). */
ZE_API int ze_aio_probe(int backend);

/* A queue that keeps up to depth blocks of block_bytes, a multiple of ZE_AIO_ALIGNMENT, in flight. ZE_AIO_AUTO takes
 * the first backend that works. 0 or -errno. Not to be used in a child after fork. */
ZE_API int ze_aio_open(int backend, int depth, int64_t block_bytes, struct ze_aio_queue** queue);

/* The backend in use. */
ZE_API int ze_aio_backend(const struct ze_aio_queue* queue);

/* Waits for every transfer and frees the queue. Its transfers stay, each until it is released. */
ZE_API void ze_aio_close(struct ze_aio_queue* queue);

/* Begins to read (write: to write) `bytes` at `offset` of a file to (from) `address`. direct_fd is open with O_DIRECT,
 * or -1; fd is open on the same file without. Blocks that O_DIRECT refuses go through fd. Memory and descriptors are
 * in use until the transfer is done. Transfers may overtake each other: of two that overlap the second waits for the
 * caller to see the first done. NULL where there is no memory. */
ZE_API struct ze_aio_transfer* ze_aio_submit(struct ze_aio_queue* queue, int write, int fd, int direct_fd,
                                             void* address, int64_t bytes, int64_t offset);

struct ze_aio_result {
  int32_t error;        /* 0, an errno, or ZE_AIO_NO_PROGRESS: of the failed block that is first in the file */
  int32_t refused;      /* blocks that O_DIRECT refused with EINVAL */
  int64_t error_offset; /* where in the file that block failed */
};

/* 1 once the transfer is done, with *result filled in; 0 where timeout_ms passed first. */
ZE_API int ze_aio_wait(struct ze_aio_transfer* transfer, int timeout_ms, struct ze_aio_result* result);

/* Forgets the transfer; one that is under way goes on. */
ZE_API void ze_aio_release(struct ze_aio_transfer* transfer);

/* For tests: blocks number `first` to first + count - 1 of this process, counted from 1 from this call on,
 * go wrong. The environment variable ZEROENGINE_AIO_FAULT, read when the first queue is opened, does the
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
