// A device of PyTorch for tests, out of tree (dispatch key PrivateUse1): its memory is that of the
// host, each of its streams is a thread that runs queued work in order. Copies from and to pinned
// memory and busy_() are queued; all other operators wait for the stream and run on the CPU.
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

namespace {

using Clock = std::chrono::steady_clock;
using Lock = std::unique_lock<std::mutex>;

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
const c10::Device device(kDevice, 0);

// --- streams and events ---

class Queue {
 public:
  Queue() { std::thread([this] { run(); }).detach(); }

  void push(std::function<void()> work) {
    Lock lock(mutex_);
    work_.push_back(std::move(work));
    changed_.notify_all();
  }

  bool is_empty() {
    Lock lock(mutex_);
    return work_.empty();
  }

  void wait() {
    Lock lock(mutex_);
    const auto number = finished_ + work_.size();
    changed_.wait(lock, [&] { return finished_ >= number; });
  }

 private:
  void run() {
    while (true) {
      Lock lock(mutex_);
      changed_.wait(lock, [&] { return !work_.empty(); });
      auto work = std::move(work_.front());  // its place stays taken while it runs
      lock.unlock();
      work();
      work = nullptr;
      lock.lock();
      work_.pop_front();
      ++finished_;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_;
  size_t finished_ = 0;
};

std::mutex queues_mutex;
std::vector<Queue*> queues;  // by number of the stream; never destroyed: their threads use them
thread_local c10::StreamId current_stream = 0;

Queue& get_queue(c10::StreamId number) {
  Lock lock(queues_mutex);
  if (queues.empty())
    queues.push_back(new Queue());  // the default stream: the device is initialized from here on
  return *queues.at(number);
}

Queue& get_current_queue() { return get_queue(current_stream); }

c10::Stream make_stream(c10::StreamId number) {
  return c10::Stream(c10::Stream::UNSAFE, device, number);
}

c10::Stream add_stream() {
  get_queue(0);
  Lock lock(queues_mutex);
  queues.push_back(new Queue());
  return make_stream(queues.size() - 1);
}

struct Moment {  // one recording of an event
  std::mutex mutex;
  std::condition_variable changed;
  bool is_reached = false;
  Clock::time_point time;

  void reach() {
    Lock lock(mutex);
    time = Clock::now();
    is_reached = true;
    changed.notify_all();
  }

  void wait() {
    Lock lock(mutex);
    changed.wait(lock, [&] { return is_reached; });
  }
};
using MomentPtr = std::shared_ptr<Moment>;

MomentPtr get_moment(void* event) { return event ? *static_cast<MomentPtr*>(event) : nullptr; }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device) const override { return device; }
  c10::Device getDevice() const override { return device; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device) const override { return make_stream(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return make_stream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return add_stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return add_stream(); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return make_stream(std::exchange(current_stream, stream.id()));
  }
  bool queryStream(const c10::Stream& stream) const override {
    return get_queue(stream.id()).is_empty();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    get_queue(stream.id()).wait();
  }
  void synchronizeDevice(c10::DeviceIndex) const override {
    Lock lock(queues_mutex);
    const auto all = queues;
    lock.unlock();
    for (auto* queue : all)
      queue->wait();
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag)
      const override {
    if (!*event)
      *event = new MomentPtr();
    auto moment = std::make_shared<Moment>();
    *static_cast<MomentPtr*>(*event) = moment;
    get_queue(stream.id()).push([moment] { moment->reach(); });
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (auto moment = get_moment(event))
      get_queue(stream.id()).push([moment] { moment->wait(); });
  }
  bool queryEvent(void* event) const override {
    auto moment = get_moment(event);
    if (!moment)
      return true;
    Lock lock(moment->mutex);
    return moment->is_reached;
  }
  void synchronizeEvent(void* event) const override {
    if (auto moment = get_moment(event))
      moment->wait();
  }
  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
    using Milliseconds = std::chrono::duration<double, std::milli>;
    return Milliseconds(get_moment(second)->time - get_moment(first)->time).count();
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<MomentPtr*>(event);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// --- memory ---

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    get_queue(0);
    void* data = std::malloc(bytes);
    return {data, data, &std::free, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    get_current_queue().wait();
    default_copy_data(to, from, bytes);
  }
} device_allocator;
REGISTER_ALLOCATOR(kDevice, &device_allocator)

std::mutex pinned_mutex;
std::set<const void*> pinned;

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = std::malloc(bytes);
    Lock lock(pinned_mutex);
    pinned.insert(data);
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }
  static void release(void* data) {
    Lock lock(pinned_mutex);
    pinned.erase(data);
    std::free(data);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
} pinned_allocator;

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    Lock lock(queues_mutex);
    return !queues.empty();
  }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* data) const override {
    Lock lock(pinned_mutex);
    return pinned.count(data) != 0;
  }
} hooks;

// --- operators ---

at::Tensor view_on_host(const at::Tensor& tensor) {
  return at::from_blob(
      tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
}

bool is_pinned(const at::Tensor& tensor) {
  return tensor.is_cpu() && hooks.isPinnedPtr(tensor.storage().data());
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  auto& queue = get_current_queue();
  // Storages, not tensors: the last reference to a tensor may need the interpreter lock.
  queue.push([source = view_on_host(from), target = view_on_host(to), kept = from.storage(),
              also_kept = to.storage()]() mutable { target.copy_(source); });
  const bool touches_host = from.is_cpu() || to.is_cpu();
  if (touches_host && !(non_blocking && (is_pinned(from) || is_pinned(to))))
    queue.wait();
  return to;
}

const at::Tensor& resize(
    const at::Tensor& tensor, at::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  get_current_queue().wait();
  return at::native::resize_(tensor, sizes, format);
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  return copy_from(from, resize(to, from.sizes(), std::nullopt), false);
}

at::Scalar read_scalar(const at::Tensor& tensor) {
  get_current_queue().wait();
  return at::native::_local_scalar_dense_cpu(view_on_host(tensor));
}

at::Tensor make_empty(
    at::IntArrayRef sizes,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device>,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      sizes, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

at::Tensor make_empty_strided(
    at::IntArrayRef sizes,
    at::IntArrayRef strides,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device>,
    std::optional<bool>) {
  return at::detail::empty_strided_generic(
      sizes, strides, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}

at::Tensor& keep_busy(at::Tensor& tensor, int64_t milliseconds) {
  get_current_queue().push(
      [=] { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); });
  return tensor;
}

void fall_back(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY(testdevice, library) {
  library.def("busy_(Tensor(a!) tensor, int milliseconds) -> Tensor(a!)");
  library.def("is_initialized() -> bool", [] { return hooks.hasPrimaryContext(0); });
}

TORCH_LIBRARY_IMPL(testdevice, PrivateUse1, library) {
  library.impl("busy_", &keep_busy);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &make_empty);
  library.impl("empty_strided", &make_empty_strided);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &read_scalar);
  library.impl("resize_", &resize);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>());
}

const bool is_registered = (at::RegisterPrivateUse1HooksInterface(&hooks), true);

}  // namespace
