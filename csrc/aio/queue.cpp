#include "queue.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include <sys/mman.h>
#include <time.h>

namespace ze {

namespace {

constexpr int kMaxRetries = 2000;  // of EAGAIN and EINTR without progress
constexpr int kQuickRetries = 16;  // further ones wait a millisecond each
constexpr size_t kHugePage = size_t(1) << 21;

bool aligned(const Block& block) {
  const auto bits = reinterpret_cast<uintptr_t>(block.address) | uintptr_t(block.offset) | uintptr_t(block.bytes);
  return bits % ZE_AIO_ALIGNMENT == 0;
}

}  // namespace

void release(Transfer* transfer) {
  if (transfer->owners.fetch_sub(1, std::memory_order_acq_rel) == 1) delete transfer;
}

Queue::Queue(int depth, int64_t block_bytes) : depth(depth), block_bytes_(block_bytes), blocks_(size_t(depth)) {
  for (Block& block : blocks_) free_.push_back(&block);
}

void Queue::submit(Transfer* transfer) {
  std::lock_guard lock(mutex_);
  waiting_[transfer->write].push_back(transfer);
  ++under_way_;
  if (transfer->bytes == 0) {
    waiting_[transfer->write].pop_back();
    finish(transfer);
  }
  work_.notify_all();
}

Block* Queue::take() {
  if (!retries_.empty()) {
    Block* block = retries_.front();
    retries_.pop_front();
    return block;
  }
  if (free_.empty() || (waiting_[0].empty() && waiting_[1].empty())) return nullptr;
  const int kind = waiting_[turn_].empty() ? 1 - turn_ : turn_;
  turn_ = 1 - kind;
  Transfer* transfer = waiting_[kind].front();
  Block* block = free_.back();
  free_.pop_back();

  // O_DIRECT takes aligned sizes only. The ragged end of a transfer is a block of its own, so that the rest can be
  // direct.
  const int64_t left = transfer->bytes - transfer->issued;
  int64_t bytes = std::min(left, block_bytes_);
  if (bytes > ZE_AIO_ALIGNMENT) bytes -= bytes % ZE_AIO_ALIGNMENT;
  *block = Block{};
  block->transfer = transfer;
  block->address = transfer->address + transfer->issued;
  block->offset = transfer->offset + transfer->issued;
  block->bytes = block->request = bytes;
  block->direct = transfer->direct_fd >= 0 && (aligned(*block) || (!transfer->write && cut_bounced(block, left)));
  if (block->bounce != nullptr) bytes = block->wanted;
  inject(block);
  transfer->issued += bytes;
  ++transfer->in_flight;
  if (transfer->issued == transfer->bytes) waiting_[kind].pop_front();
  return block;
}

bool Queue::cut_bounced(Block* block, int64_t left) {
  if (!bounces_) {
    const size_t bytes = (size_t(depth * block_bytes_) + kHugePage - 1) / kHugePage * kHugePage;
    bounces_.reset(static_cast<char*>(std::aligned_alloc(kHugePage, bytes)));
    if (!bounces_) return false;
    // A transfer to scattered small pages is cut into several by the kernel: at 1.1 GB/s where huge pages take 3.
#ifdef MADV_HUGEPAGE
    madvise(bounces_.get(), bytes, MADV_HUGEPAGE);
#endif
  }
  block->bounce = bounces_.get() + (block - blocks_.data()) * block_bytes_;
  block->target = block->address;
  block->skip = block->offset % ZE_AIO_ALIGNMENT;
  block->wanted = std::min(left, block_bytes_ - block->skip);
  const int64_t end = block->skip + block->wanted;
  block->address = block->bounce;
  block->offset -= block->skip;
  block->bytes = block->request = (end + ZE_AIO_ALIGNMENT - 1) / ZE_AIO_ALIGNMENT * ZE_AIO_ALIGNMENT;
  return true;
}

Block* Queue::next() {
  std::lock_guard lock(mutex_);
  return take();
}

Block* Queue::wait_next() {
  std::unique_lock lock(mutex_);
  for (;;) {
    if (Block* block = take()) return block;
    if (closed_) return nullptr;
    work_.wait(lock);
  }
}

void Queue::complete(Block* block, int64_t result) {
  if (block->fault > 0) result = -block->fault;
  if (block->fault == ZE_AIO_FAULT_EMPTY) result = 0;
  block->fault = 0;
  if ((result == -EAGAIN || result == -EINTR) && block->retries >= kQuickRetries) {
    const timespec pause{0, 1000000};
    nanosleep(&pause, nullptr);
  }
  if (block->bounce != nullptr && result > 0 &&
      block->address + result - block->bounce >= block->skip + block->wanted) {
    std::memcpy(block->target, block->bounce + block->skip, size_t(block->wanted));
    // The file may end before the last of the aligned blocks does.
    result = block->bytes;
  }

  std::lock_guard lock(mutex_);
  Transfer* transfer = block->transfer;
  bool again = false;
  if (result == -EINVAL && block->direct) {
    // The file system refuses O_DIRECT for this block: it goes through the page cache.
    block->direct = false;
    ++transfer->result.refused;
    again = true;
  } else if (result == -EAGAIN || result == -EINTR) {
    again = ++block->retries < kMaxRetries;
  } else if (result > 0 && result < block->bytes) {
    block->address += result;
    block->offset += result;
    block->bytes -= result;
    block->retries = 0;
    block->direct = block->direct && aligned(*block);
    again = true;
  }
  if (again) {
    block->request = block->bytes;
    retries_.push_back(block);
    return;
  }
  if (result <= 0) {
    // Of several failures the first in the file is reported, whatever order they arrive in.
    ze_aio_result& reported = transfer->result;
    // The first block of an unaligned read begins before the transfer does.
    const int64_t offset = std::max(block->offset, transfer->offset);
    if (reported.error == 0 || offset < reported.error_offset) {
      reported.error = result < 0 ? int32_t(-result) : ZE_AIO_NO_PROGRESS;
      reported.error_offset = offset;
    }
    // The rest of a transfer that failed is never issued.
    if (transfer->issued < transfer->bytes) {
      auto& waiting = waiting_[transfer->write];
      waiting.erase(std::find(waiting.begin(), waiting.end(), transfer));
      transfer->issued = transfer->bytes;
    }
  }
  free_.push_back(block);
  if (--transfer->in_flight == 0 && transfer->issued == transfer->bytes) finish(transfer);
}

void Queue::finish(Transfer* transfer) {
  {
    std::lock_guard lock(transfer->mutex);
    transfer->done = true;
    transfer->changed.notify_all();
  }
  release(transfer);
  if (--under_way_ == 0) idle_.notify_all();
}

void Queue::drain() {
  std::unique_lock lock(mutex_);
  idle_.wait(lock, [this] { return under_way_ == 0; });
}

void Queue::close() {
  std::lock_guard lock(mutex_);
  closed_ = true;
  work_.notify_all();
}

bool Queue::closed() {
  std::lock_guard lock(mutex_);
  return closed_;
}

}  // namespace ze
