// pread and pwrite in a thread for each block in flight, which every system has.

#include <cerrno>
#include <system_error>
#include <thread>
#include <vector>

#include <unistd.h>

#include "queue.h"

namespace ze {

namespace {

class Threads : public Backend {
 public:
  explicit Threads(Queue* queue) : queue_(queue) {
    SignalsBlocked blocked;
    try {
      for (int i = 0; i < queue->depth; ++i) threads_.emplace_back([this] { run(); });
    } catch (const std::system_error&) {
      // Fewer threads serve as well, with fewer blocks in flight.
      if (threads_.empty()) throw;
    }
  }

  ~Threads() override {
    for (std::thread& thread : threads_) thread.join();
  }

  // The threads wait on the queue itself.
  void wake() override {}

 private:
  void run() {
    while (Block* block = queue_->wait_next()) {
      const auto bytes = size_t(block->request);
      const ssize_t moved = block->transfer->write ? pwrite(block->fd(), block->address, bytes, block->offset)
                                                   : pread(block->fd(), block->address, bytes, block->offset);
      queue_->complete(block, moved < 0 ? -errno : moved);
    }
  }

  Queue* const queue_;
  std::vector<std::thread> threads_;
};

}  // namespace

int open_threads(Queue* queue, Backend** backend) {
  try {
    *backend = new Threads(queue);
    return 0;
  } catch (const std::exception&) {
    return -EAGAIN;
  }
}

}  // namespace ze
