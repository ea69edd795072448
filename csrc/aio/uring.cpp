// io_uring by its own system calls. It needs IORING_OP_READ, which Linux has from 5.6 on.

#include "queue.h"

#include <cerrno>

#if defined(__linux__) && __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#endif

#if defined(IO_URING_OP_SUPPORTED)

#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <thread>

#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

// Flags of kernels that may be newer than the headers.
#ifndef IORING_SETUP_COOP_TASKRUN
#define IORING_SETUP_COOP_TASKRUN (1U << 8)
#endif
#ifndef IORING_SETUP_SINGLE_ISSUER
#define IORING_SETUP_SINGLE_ISSUER (1U << 12)
#endif
#ifndef IORING_SETUP_DEFER_TASKRUN
#define IORING_SETUP_DEFER_TASKRUN (1U << 13)
#endif

namespace ze {

namespace {

unsigned load(const unsigned* x) { return __atomic_load_n(x, __ATOMIC_ACQUIRE); }
void store(unsigned* x, unsigned value) { __atomic_store_n(x, value, __ATOMIC_RELEASE); }

// The submission and completion queues that are shared with the kernel. IORING_SETUP_SINGLE_ISSUER wants one thread to
// make the ring and to use it.
class Ring {
 public:
  Ring() = default;
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  ~Ring() {
    if (sqes_ != MAP_FAILED) munmap(sqes_, sqes_bytes_);
    if (rings_ != MAP_FAILED) munmap(rings_, rings_bytes_);
    if (fd_ >= 0) close(fd_);
  }

  int open(unsigned entries) {
    io_uring_params params{};
    // The newer the kernel, the less it interrupts this thread with completions: never, never outside of system calls,
    // at any time.
    for (unsigned flags : {IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN, IORING_SETUP_COOP_TASKRUN, 0U}) {
      params = io_uring_params{};
      params.flags = flags;
      fd_ = int(syscall(SYS_io_uring_setup, entries, &params));
      if (fd_ >= 0 || errno != EINVAL) break;
    }
    if (fd_ < 0) return -errno;
    if (!(params.features & IORING_FEAT_SINGLE_MMAP) || !has_read_and_write()) return -ENOSYS;

    rings_bytes_ = std::max<size_t>(params.sq_off.array + params.sq_entries * sizeof(unsigned),
                                    params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe));
    sqes_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
    rings_ = map(rings_bytes_, IORING_OFF_SQ_RING);
    sqes_ = map(sqes_bytes_, IORING_OFF_SQES);
    if (rings_ == MAP_FAILED || sqes_ == MAP_FAILED) return -ENOMEM;
    char* base = static_cast<char*>(rings_);
    auto at = [base](unsigned offset) { return reinterpret_cast<unsigned*>(base + offset); };
    sq_head_ = at(params.sq_off.head);
    sq_tail_ = at(params.sq_off.tail);
    sq_mask_ = *at(params.sq_off.ring_mask);
    sq_array_ = at(params.sq_off.array);
    cq_head_ = at(params.cq_off.head);
    cq_tail_ = at(params.cq_off.tail);
    cq_mask_ = *at(params.cq_off.ring_mask);
    cqes_ = reinterpret_cast<io_uring_cqe*>(base + params.cq_off.cqes);
    return 0;
  }

  // Puts a request in line. There is always room: the ring is made for all that are in flight.
  void push(int opcode, int fd, void* address, unsigned bytes, int64_t offset, void* user) {
    const unsigned tail = *sq_tail_, slot = tail & sq_mask_;
    io_uring_sqe& sqe = static_cast<io_uring_sqe*>(sqes_)[slot];
    std::memset(&sqe, 0, sizeof sqe);
    sqe.opcode = uint8_t(opcode);
    sqe.fd = fd;
    sqe.addr = reinterpret_cast<uint64_t>(address);
    sqe.len = bytes;
    sqe.off = uint64_t(offset);
    sqe.user_data = reinterpret_cast<uint64_t>(user);
    sq_array_[slot] = slot;
    store(sq_tail_, tail + 1);
  }

  // Submits the requests in line and waits for `completions` of all that are under way. Returns 0 or -errno.
  int enter(unsigned completions = 1) {
    const unsigned ready = *sq_tail_ - load(sq_head_);
    const unsigned flags = completions != 0 ? IORING_ENTER_GETEVENTS : 0;
    return syscall(SYS_io_uring_enter, fd_, ready, completions, flags, nullptr, 0) < 0 ? -errno : 0;
  }

  // Takes the next completion. Returns false where there is none.
  bool pop(void** user, int* result) {
    const unsigned head = *cq_head_;
    if (head == load(cq_tail_)) return false;
    const io_uring_cqe& cqe = cqes_[head & cq_mask_];
    *user = reinterpret_cast<void*>(cqe.user_data);
    *result = cqe.res;
    store(cq_head_, head + 1);
    return true;
  }

 private:
  bool has_read_and_write() const {
    alignas(io_uring_probe) char memory[sizeof(io_uring_probe) + 256 * sizeof(io_uring_probe_op)] = {};
    auto* probe = reinterpret_cast<io_uring_probe*>(memory);
    if (syscall(SYS_io_uring_register, fd_, IORING_REGISTER_PROBE, probe, 256) < 0) return false;
    return probe->last_op >= IORING_OP_WRITE && (probe->ops[IORING_OP_READ].flags & IO_URING_OP_SUPPORTED) &&
           (probe->ops[IORING_OP_WRITE].flags & IO_URING_OP_SUPPORTED);
  }

  void* map(size_t bytes, uint64_t what) const {
    return mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, off_t(what));
  }

  int fd_ = -1;
  void *rings_ = MAP_FAILED, *sqes_ = MAP_FAILED;
  size_t rings_bytes_ = 0, sqes_bytes_ = 0;
  unsigned *sq_head_ = nullptr, *sq_tail_ = nullptr, *sq_array_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
  unsigned sq_mask_ = 0, cq_mask_ = 0;
  io_uring_cqe* cqes_ = nullptr;
};

// One thread owns the ring and sleeps in it. A read of an eventfd is always under way, so that wake(), which writes to
// the eventfd, arrives as a completion.
class IoUring : public Backend {
 public:
  explicit IoUring(Queue* queue) : queue_(queue) {}

  ~IoUring() override {
    if (thread_.joinable()) {
      if (status_ == 0) wake();
      thread_.join();
    }
    if (event_ >= 0) close(event_);
  }

  int start() {
    event_ = eventfd(0, EFD_CLOEXEC);
    if (event_ < 0) return -errno;
    {
      SignalsBlocked blocked;
      thread_ = std::thread([this] { run(); });
    }
    std::unique_lock lock(mutex_);
    opened_.wait(lock, [this] { return status_ <= 0; });
    return status_;
  }

  void wake() override {
    const uint64_t one = 1;
    (void)!write(event_, &one, sizeof one);
  }

 private:
  void run() {
    Ring ring;
    {
      std::lock_guard lock(mutex_);
      status_ = ring.open(unsigned(queue_->depth) + 1);
      opened_.notify_one();
      if (status_ < 0) return;
    }
    bool eventfd_read = false;  // whether it is under way
    for (;;) {
      if (!eventfd_read) ring.push(IORING_OP_READ, event_, &wakes_, sizeof wakes_, 0, nullptr);
      eventfd_read = true;
      push_blocks(&ring);
      const int status = ring.enter();
      // EAGAIN and EBUSY: the kernel is short of memory or of room for completions.
      if (status < 0 && status != -EINTR) {
        const timespec pause{0, 1000000};
        nanosleep(&pause, nullptr);
      }
      void* user;
      int result;
      while (ring.pop(&user, &result)) {
        if (user == nullptr) {
          eventfd_read = false;
          continue;
        }
        --in_flight_;
        auto* block = static_cast<Block*>(user);
        const bool is_copied = block->bounce != nullptr;
        queue_->complete(block, result);
        // The disk must not wait for the copies of the other blocks that are done.
        if (is_copied && push_blocks(&ring)) ring.enter(0);
      }
      if (!eventfd_read && in_flight_ == 0 && queue_->closed()) return;
    }
  }

  // Puts all blocks that there are in line. Returns whether there were any.
  bool push_blocks(Ring* ring) {
    const int before = in_flight_;
    while (Block* block = queue_->next()) {
      ring->push(block->transfer->write ? IORING_OP_WRITE : IORING_OP_READ, block->fd(), block->address,
                 unsigned(block->request), block->offset, block);
      ++in_flight_;
    }
    return in_flight_ > before;
  }

  Queue* const queue_;
  int event_ = -1;
  uint64_t wakes_ = 0;
  int in_flight_ = 0;
  std::mutex mutex_;
  std::condition_variable opened_;
  int status_ = 1;
  std::thread thread_;
};

}  // namespace

int open_io_uring(Queue* queue, Backend** backend) {
  try {
    auto uring = std::make_unique<IoUring>(queue);
    const int status = uring->start();
    if (status == 0) *backend = uring.release();
    return status;
  } catch (const std::exception&) {
    return -EAGAIN;
  }
}

}  // namespace ze

#else

int ze::open_io_uring(ze::Queue*, ze::Backend**) { return -ENOSYS; }

#endif
