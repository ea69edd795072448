// The part that both backends share: transfers, their blocks, and the handling of a block's result.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <memory>
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
  int64_t issued = 0;  // bytes that blocks were cut from
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
  char* bounce;           // memory of the queue's own that is read into: see the note on unaligned reads
  char* target;           // where `wanted` bytes go from there, beginning with number `skip`
  int64_t skip, wanted;

  int fd() const { return direct ? transfer->direct_fd : transfer->fd; }
};

// [Note: Threads of a queue]
// Callers of the library run submit() and wait for transfers. The backend's own threads run next() (or wait_next()) and
// complete(). A block belongs to the thread that took it until that thread hands it to complete(). A block that was cut
// short or interrupted goes back into line for the rest or for another try.
//
// submit() alone wakes sleeping threads. complete() need not: it frees one block at most, and the thread that calls it
// takes the next block right after.
//
// [Note: Unaligned reads]
// O_DIRECT moves whole aligned blocks to aligned memory. A read of other bytes, such as of a tensor within a file that
// another program wrote, takes the aligned blocks around them into memory of the queue's own, from which the thread that
// sees the block done copies what is wanted.
class Queue {
 public:
  Queue(int depth, int64_t block_bytes);

  void submit(Transfer* transfer);
  // Returns a block to issue, or nullptr: there is none now, or `depth` are in flight.
  Block* next();
  // Waits for a block to issue. Returns nullptr once the queue is closed and nothing is left.
  Block* wait_next();
  // Takes a block back with its result: bytes moved, or -errno.
  void complete(Block* block, int64_t result);
  // Waits until no transfer is under way.
  void drain();
  // Ends the waits of wait_next().
  void close();
  bool closed();

  const int depth;

 private:
  Block* take();
  // Cuts a block of at most `left` bytes that goes through the queue's own memory. Returns false if there is none.
  bool cut_bounced(Block* block, int64_t left);
  void finish(Transfer* transfer);

  const int64_t block_bytes_;
  std::mutex mutex_;
  std::condition_variable work_, idle_;
  std::vector<Block> blocks_;
  // block_bytes_ bytes for each block, from the first unaligned read on.
  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };
  std::unique_ptr<char, Free> bounces_;
  std::vector<Block*> free_;
  std::deque<Block*> retries_;
  std::deque<Transfer*> waiting_[2];  // reads and writes that are not wholly issued; they take turns
  int turn_ = 0;
  int64_t under_way_ = 0;
  bool closed_ = false;
};

// The threads that carry blocks to the kernel and back.
class Backend {
 public:
  // Stops the threads. The queue is drained and closed before.
  virtual ~Backend() = default;
  // Says that Queue::next() may have a block now.
  virtual void wake() = 0;
};

// Each returns 0 with *backend set, or -errno. `queue` outlives the backend.
int open_io_uring(Queue* queue, Backend** backend);
int open_threads(Queue* queue, Backend** backend);

// Marks a new block if a test wants it to fail.
void inject(Block* block);
void read_fault_environment();

void release(Transfer* transfer);

// Blocks all signals for its lifetime. Threads that are made meanwhile inherit the mask, so that the program's signal
// handlers never run in a thread of this library, where Python would not expect them.
class SignalsBlocked {
 public:
  SignalsBlocked();
  ~SignalsBlocked();

 private:
  sigset_t old_;
};

}  // namespace ze
