// The C interface over queue and backends.

#include <cerrno>
#include <chrono>
#include <exception>
#include <memory>
#include <new>

#include <signal.h>

#include "queue.h"

using ze::Backend;
using ze::Queue;

struct ze_aio_queue {
  ze_aio_queue(int depth, int64_t block_bytes) : queue(depth, block_bytes) {}

  Queue queue;
  Backend* backend = nullptr;
  int kind = ZE_AIO_AUTO;
};

namespace ze {

SignalsBlocked::SignalsBlocked() {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old_);
}

SignalsBlocked::~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &old_, nullptr); }

}  // namespace ze

namespace {

constexpr int kMaxDepth = 4096;
constexpr int64_t kMaxBlock = int64_t(1) << 30;

int open_backend(int kind, Queue* queue, Backend** backend) {
  switch (kind) {
    case ZE_AIO_IO_URING: return ze::open_io_uring(queue, backend);
    case ZE_AIO_THREADS: return ze::open_threads(queue, backend);
    default: return -EINVAL;
  }
}

}  // namespace

extern "C" {

ZE_API int ze_aio_abi_version(void) { return ZE_AIO_ABI_VERSION; }

ZE_API int ze_aio_probe(int backend) {
  ze_aio_queue* queue = nullptr;
  const int status = ze_aio_open(backend, 1, ZE_AIO_ALIGNMENT, &queue);
  if (status == 0) ze_aio_close(queue);
  return status;
}

ZE_API int ze_aio_open(int backend, int depth, int64_t block_bytes, ze_aio_queue** out) {
  if (depth < 1 || depth > kMaxDepth || block_bytes < ZE_AIO_ALIGNMENT || block_bytes > kMaxBlock ||
      block_bytes % ZE_AIO_ALIGNMENT != 0)
    return -EINVAL;
  ze::read_fault_environment();
  try {
    auto queue = std::make_unique<ze_aio_queue>(depth, block_bytes);
    int status = -EINVAL;
    for (int kind : {ZE_AIO_IO_URING, ZE_AIO_THREADS}) {
      if (backend != ZE_AIO_AUTO && backend != kind) continue;
      status = open_backend(kind, &queue->queue, &queue->backend);
      queue->kind = kind;
      if (status == 0) break;
    }
    if (status == 0) *out = queue.release();
    return status;
  } catch (const std::exception&) {
    return -ENOMEM;
  }
}

ZE_API int ze_aio_backend(const ze_aio_queue* queue) { return queue->kind; }

ZE_API void ze_aio_close(ze_aio_queue* queue) {
  queue->queue.drain();
  queue->queue.close();
  delete queue->backend;
  delete queue;
}

ZE_API ze_aio_transfer* ze_aio_submit(ze_aio_queue* queue, int write, int fd, int direct_fd, void* address,
                                      int64_t bytes, int64_t offset) {
  try {
    auto transfer = std::make_unique<ze_aio_transfer>();
    transfer->write = write != 0;
    transfer->fd = fd;
    transfer->direct_fd = direct_fd;
    transfer->address = static_cast<char*>(address);
    transfer->bytes = bytes;
    transfer->offset = offset;
    queue->queue.submit(transfer.get());
    queue->backend->wake();
    return transfer.release();
  } catch (const std::exception&) {
    return nullptr;
  }
}

ZE_API int ze_aio_wait(ze_aio_transfer* transfer, int timeout_ms, ze_aio_result* result) {
  std::unique_lock lock(transfer->mutex);
  const auto done = [transfer] { return transfer->done; };
  if (timeout_ms > 0) transfer->changed.wait_for(lock, std::chrono::milliseconds(timeout_ms), done);
  if (!transfer->done) return 0;
  *result = transfer->result;
  return 1;
}

ZE_API void ze_aio_release(ze_aio_transfer* transfer) { ze::release(transfer); }

}  // extern "C"
