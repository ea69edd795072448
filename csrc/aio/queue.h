// What the three backends share: transfers, their blocks, and what becomes of a block's result.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

#include <signal.h>

#include "../zeroengine_aio.h"

struct ze_aio_transfer {
  bool write;
  int fd, direct_fd;
  char* address;
  int64_t bytes, offset;

  // Guarded by the queue's mutex.
  int64_t issued = 0;  // bytes that blocks were made of
  int in_flight = 0;   // blocks
  ze_aio_result result{};

  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  std::atomic<int> owners{2};  // the queue until it is done, the caller until it releases it
};

namespace ze {

using Transfer = ze_aio_transfer;

struct Block {
  Transfer* transfer;
  char* address;
  int64_t offset, bytes;  // what is left to move
  int64_t request;        // how much of it to ask for: all, unless a fault shortens it
  int fault;
  int retries;            // without progress
  bool direct;

  int fd() const { return direct ? transfer->direct_fd : transfer->fd; }
};

// [Note: Who calls what]
// submit() is the callers'. next() and complete() are the backend's own threads', which run from start() to stop().
// A block belongs to the thread that took it from next() until that thread hands it to complete(), which may put it
// back into line: short ones for the rest, interrupted ones for another try.
class Queue {
 public:
  Queue(int depth, int64_t block_bytes);

  void submit(Transfer* transfer);
  // A block to issue, or nullptr: none now, or depth are in flight.
  Block* next();
  // As next(), but waits; nullptr once the queue is closed and nothing is left.
  Block* wait_next();
  // result: bytes moved, or -errno.
  void complete(Block* block, int64_t result);
  // Waits until no transfer is under way.
  void drain();
  // Ends the waits of wait_next().
  void close();
  bool closed();

  const int depth;

 private:
  Block* take();
  void settle(Transfer* transfer);

  const int64_t block_bytes_;
  std::mutex mutex_;
  std::condition_variable work_, idle_;
  std::vector<Block> blocks_;
  std::vector<Block*> free_;
  std::deque<Block*> again_;
  std::deque<Transfer*> waiting_[2];  // not wholly issued; reads and writes take turns
  int turn_ = 0;
  int64_t under_way_ = 0;
  bool closed_ = false;
};

// The threads that carry blocks to the kernel and back.
class Backend {
 public:
  virtual ~Backend() = default;  // stops them; the queue is drained and closed
  virtual void wake() = 0;       // there may be something to take from Queue::next()
};

// 0 with *backend set, or -errno. `queue` outlives it.
int open_io_uring(Queue* queue, Backend** backend);
int open_libaio(Queue* queue, Backend** backend);
int open_threads(Queue* queue, Backend** backend);

// Marks a new block if it is one that shall go wrong.
void inject(Block* block);
void read_fault_environment();

void release(Transfer* transfer);

// No signal is delivered to the threads that this makes, so that handlers run in the program's own.
class SignalsBlocked {
 public:
  SignalsBlocked();
  ~SignalsBlocked();

 private:
  sigset_t old_;
};

}  // namespace ze
