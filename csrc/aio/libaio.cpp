// Linux AIO: io_submit and io_getevents, without the library of that name. What containers that forbid io_uring have.

#include "queue.h"

#include <cerrno>

#if defined(__linux__) && __has_include(<linux/aio_abi.h>)

#include <exception>
#include <memory>
#include <thread>
#include <vector>

#include <linux/aio_abi.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

namespace ze {

namespace {

// One thread submits and reaps. It sleeps on an eventfd that completions and wake() both count up.
class LinuxAio : public Backend {
 public:
  explicit LinuxAio(Queue* queue) : queue_(queue), events_(size_t(queue->depth)) {
    requests_.reserve(size_t(queue->depth));
  }

  ~LinuxAio() override {
    if (thread_.joinable()) {
      wake();
      thread_.join();
    }
    if (context_ != 0) syscall(SYS_io_destroy, context_);
    if (event_ >= 0) close(event_);
  }

  int start() {
    if (syscall(SYS_io_setup, queue_->depth, &context_) < 0) return -errno;
    event_ = eventfd(0, EFD_CLOEXEC);
    if (event_ < 0) return -errno;
    SignalsBlocked blocked;
    thread_ = std::thread([this] { run(); });
    return 0;
  }

  void wake() override {
    const uint64_t one = 1;
    (void)!write(event_, &one, sizeof one);
  }

 private:
  void run() {
    for (;;) {
      while (Block* block = queue_->next()) requests_.push_back(request(block));
      submit();
      if (in_flight_ > 0 || requests_.empty()) {
        if (in_flight_ == 0 && queue_->closed()) return;
        uint64_t count;
        if (read(event_, &count, sizeof count) > 0) reap();
      } else {  // the kernel is short of something
        const timespec pause{0, 1000000};
        nanosleep(&pause, nullptr);
      }
    }
  }

  iocb request(Block* block) const {
    iocb out{};
    out.aio_data = reinterpret_cast<uint64_t>(block);
    out.aio_lio_opcode = block->transfer->write ? IOCB_CMD_PWRITE : IOCB_CMD_PREAD;
    out.aio_fildes = uint32_t(block->fd());
    out.aio_buf = reinterpret_cast<uint64_t>(block->address);
    out.aio_nbytes = uint64_t(block->request);
    out.aio_offset = block->offset;
    out.aio_flags = IOCB_FLAG_RESFD;
    out.aio_resfd = uint32_t(event_);
    return out;
  }

  void submit() {
    size_t begun = 0;
    std::vector<iocb*> pointers;
    for (iocb& one : requests_) pointers.push_back(&one);
    while (begun < requests_.size()) {
      const long count = syscall(SYS_io_submit, context_, long(requests_.size() - begun), pointers.data() + begun);
      if (count > 0) {
        begun += size_t(count);
        in_flight_ += int(count);
      } else if (count < 0 && errno == EINTR) {
        continue;
      } else if (count == 0 || errno == EAGAIN) {
        break;
      } else {  // the first of them is refused
        queue_->complete(reinterpret_cast<Block*>(requests_[begun].aio_data), -errno);
        ++begun;
      }
    }
    requests_.erase(requests_.begin(), requests_.begin() + long(begun));
  }

  void reap() {
    timespec now{0, 0};
    const long count = syscall(SYS_io_getevents, context_, 0L, long(events_.size()), events_.data(), &now);
    for (long i = 0; i < count; ++i) {
      --in_flight_;
      queue_->complete(reinterpret_cast<Block*>(events_[size_t(i)].data), events_[size_t(i)].res);
    }
  }

  Queue* const queue_;
  aio_context_t context_ = 0;
  int event_ = -1;
  std::vector<io_event> events_;
  std::vector<iocb> requests_;  // not begun yet; the kernel copies those that are
  int in_flight_ = 0;
  std::thread thread_;
};

}  // namespace

int open_libaio(Queue* queue, Backend** backend) {
  try {
    auto aio = std::make_unique<LinuxAio>(queue);
    const int status = aio->start();
    if (status == 0) *backend = aio.release();
    return status;
  } catch (const std::exception&) {
    return -EAGAIN;
  }
}

}  // namespace ze

#else

int ze::open_libaio(ze::Queue*, ze::Backend**) { return -ENOSYS; }

#endif
