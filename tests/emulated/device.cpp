// A GPU for torch built without CUDA: device "cuda", in the CPU's memory, computed by the CPU's kernels.
//
// Tensors are told apart as those of a real GPU are: an operation that takes memory of both sides fails, autograd runs
// on a thread of the device's own, and what a host would wait for is an error while `forbid_waiting` is on. Everything
// is done at once; order between streams is not looked at.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>

namespace {

using at::IntArrayRef;
using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

const Device kDevice(c10::DeviceType::CUDA, 0);

// -- memory -----------------------------------------------------------------------------------------------------------

std::mutex mutex;
std::map<const void*, size_t> on_device, pinned;
size_t allocated = 0, peak = 0;

bool holds(const std::map<const void*, size_t>& ranges, const void* address) {
  std::lock_guard<std::mutex> lock(mutex);
  auto next = ranges.upper_bound(address);
  if (next == ranges.begin()) return false;
  auto found = std::prev(next);
  return static_cast<const char*>(address) < static_cast<const char*>(found->first) + found->second;
}

void release(void* memory) {
  {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = on_device.find(memory);
    allocated -= found->second;
    on_device.erase(found);
  }
  std::free(memory);
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    if (size == 0) return {nullptr, nullptr, nullptr, kDevice};
    size_t rounded = (size + 511) / 512 * 512;  // as torch's own
    void* memory = std::aligned_alloc(512, rounded);
    std::memset(memory, 0xFF, rounded);  // NaN, in every floating dtype
    std::lock_guard<std::mutex> lock(mutex);
    on_device[memory] = rounded;
    allocated += rounded;
    peak = std::max(peak, allocated);
    return {memory, memory, &release, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
} device_allocator;

void unpin(void* memory) {
  {
    std::lock_guard<std::mutex> lock(mutex);
    pinned.erase(memory);
  }
  std::free(memory);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    size_t rounded = std::max<size_t>((size + 511) / 512 * 512, 512);
    void* memory = std::aligned_alloc(512, rounded);
    std::lock_guard<std::mutex> lock(mutex);
    pinned[memory] = rounded;
    return {memory, memory, &unpin, at::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
} pinned_allocator;

// -- the device -------------------------------------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice.type(); }
  Device exchangeDevice(Device) const override { return kDevice; }
  Device getDevice() const override { return kDevice; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return Stream(Stream::DEFAULT, kDevice); }
  Stream getDefaultStream(Device) const override { return Stream(Stream::DEFAULT, kDevice); }
  Stream exchangeStream(Stream) const override { return Stream(Stream::DEFAULT, kDevice); }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {
    TORCH_CHECK(false, "record_stream");  // zeroengine never calls it
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* data) const override { return holds(pinned, data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  Device getDeviceFromPtr(void*) const override { return kDevice; }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  at::Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)

// -- what a host waits for --------------------------------------------------------------------------------------------

std::atomic<bool> waiting_is_forbidden{false};
thread_local int inside = 0;  // an operation of the device's own

struct Inside {
  Inside() { ++inside; }
  ~Inside() { --inside; }
};

void waits(const char* what) {
  TORCH_CHECK(inside || !waiting_is_forbidden, "called a synchronizing CUDA operation: ", what);
}

// -- operations -------------------------------------------------------------------------------------------------------

Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic_symint(size, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                          c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device>, std::optional<bool>) {
  return at::detail::empty_strided_symint_generic(size, stride, &device_allocator,
                                                  c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                                  c10::dtype_or_default(dtype));
}

// The same memory, as a tensor of the CPU's.
Tensor host(const Tensor& t) {
  if (t.is_cpu()) return t;
  c10::Storage storage(c10::Storage::use_byte_size_t(), t.storage().nbytes(),
                       c10::DataPtr(t.storage().mutable_data(), at::kCPU), c10::GetCPUAllocator(), true);
  return at::empty({0}, t.options().device(at::kCPU)).set_(storage, t.storage_offset(), t.sizes(), t.strides());
}

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.device() != source.device()) {
    const Tensor& there = self.is_cpu() ? self : source;
    bool late = non_blocking && (there.numel() == 0 || holds(pinned, there.const_data_ptr()));
    if (!late) waits("a copy that blocks, or of memory that is not page-locked");
  }
  Inside guard;
  auto from = host(source);
  host(self).copy_(source.is_conj() ? from.conj() : source.is_neg() ? from._neg_view() : from);
  return self;
}

Tensor copy_from(const Tensor& self, const Tensor& target, bool) {
  host(target).copy_(host(self));
  return target;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& target) {
  if (target.sizes() != self.sizes()) target.resize_(self.sizes());
  host(target).copy_(host(self));
  return target;
}

at::Scalar local_scalar_dense(const Tensor& self) {
  waits("item");
  Inside guard;
  return host(self).item();
}

Tensor as_strided(const Tensor& self, IntArrayRef size, IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

int64_t sdp_choice(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                   std::optional<double>, bool) {
  return 0;  // the one that is made of other operations
}

// Every other operation is done by the CPU's kernel, in the same memory.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  static const std::set<std::string> of_both{"aten::index", "aten::_index_put_impl_", "aten::index_put_"};
  static const std::set<std::string> waiting{"aten::nonzero", "aten::masked_select", "aten::equal", "aten::unique_dim",
                                             "aten::_unique2", "aten::is_nonzero", "aten::bincount",
                                             "aten::repeat_interleave.Tensor"};
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size();
  const std::vector<c10::IValue> given(stack->end() - count, stack->end());
  bool cpu = false;
  std::vector<std::pair<Tensor, Tensor>> written;  // ours, the CPU's
  auto served = [&](const Tensor& t, bool write) {
    cpu = cpu || (t.defined() && t.is_cpu() && (write || t.dim() > 0));
    if (!t.defined() || t.is_cpu()) return t;
    Tensor mine = host(t);
    if (write) written.emplace_back(t, mine);
    return mine;
  };
  for (size_t i = 0; i < count; ++i) {
    auto& value = (*stack)[stack->size() - count + i];
    const auto* alias = schema.arguments()[i].alias_info();
    const bool write = alias != nullptr && alias->isWrite();
    if (value.isTensor()) {
      value = served(value.toTensor(), write);
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : value.toTensorVector()) list.push_back(served(t, write));
      value = std::move(list);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& t : value.toOptionalTensorVector())
        list.push_back(t ? std::optional<Tensor>(served(*t, false)) : std::nullopt);
      value = std::move(list);
    } else if (value.isDevice()) {
      value = c10::IValue(Device(at::kCPU));
    }
  }
  TORCH_CHECK(!cpu || of_both.count(schema.name()),
              "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! (",
              schema.name(), ")");
  const std::string full_name = schema.overload_name().empty() ? schema.name() : schema.name() + "." + schema.overload_name();
  if (waiting.count(schema.name()) || waiting.count(full_name)) waits(schema.name().c_str());
  Inside guard;
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  for (auto& [ours, theirs] : written)
    if (ours.sizes() != theirs.sizes()) {
      ours.resize_(theirs.sizes());
      host(ours).copy_(theirs);
    }
  auto taken_over = [&](const Tensor& t) {
    if (!t.defined()) return t;
    for (auto& [ours, theirs] : written)
      if (theirs.is_same(t)) return ours;
    Tensor ours = at::empty_strided(t.sizes(), t.strides(), t.options().device(kDevice));
    host(ours).copy_(t);
    return ours;
  };
  const size_t returned = schema.returns().size();
  for (size_t i = 0; i < returned; ++i) {
    auto& value = (*stack)[stack->size() - returned + i];
    if (value.isTensor()) {
      value = taken_over(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : value.toTensorVector()) list.push_back(taken_over(t));
      value = std::move(list);
    }
  }
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("unfold", &at::native::unfold);
  m.impl("resize_", &at::native::resize_);
  m.impl("set_", &at::native::set_cpu_);
  m.impl("set_.source_Storage", TORCH_FN(static_cast<Tensor& (*)(Tensor&, at::Storage)>(at::native::set_)));
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("copy_", &copy_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("_fused_sdp_choice", &sdp_choice);
}

// -- what Python asks for ---------------------------------------------------------------------------------------------

void resize_storage(const Tensor& tensor, int64_t size) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  auto memory = device_allocator.allocate(size);
  size_t kept = std::min<size_t>(storage->nbytes(), size);
  if (kept) std::memcpy(memory.get(), storage->data(), kept);
  storage->set_data_ptr_noswap(std::move(memory));
  storage->set_nbytes(size);
}

void pin(int64_t address, int64_t size) {
  std::lock_guard<std::mutex> lock(mutex);
  if (size)
    pinned[reinterpret_cast<void*>(address)] = size;
  else
    pinned.erase(reinterpret_cast<void*>(address));
}

int64_t memory(bool of_peak, bool reset) {
  std::lock_guard<std::mutex> lock(mutex);
  if (reset) peak = allocated;
  return of_peak ? peak : allocated;
}

bool is_device(int64_t address) { return holds(on_device, reinterpret_cast<void*>(address)); }

void forbid_waiting(bool forbid) { waiting_is_forbidden = forbid; }

void wait() { waits("synchronize"); }

TORCH_LIBRARY(emulated_cuda, m) {
  m.def("resize_storage(Tensor tensor, int size) -> ()", &resize_storage);
  m.def("pin(int address, int size) -> ()", &pin);
  m.def("memory(bool of_peak, bool reset) -> int", &memory);
  m.def("is_device(int address) -> bool", &is_device);
  m.def("forbid_waiting(bool forbid) -> ()", &forbid_waiting);
  m.def("wait() -> ()", &wait);
}

struct Register {
  Register() { c10::SetAllocator(kDevice.type(), &device_allocator); }
} registered;

}  // namespace
