// A CUDA device without hardware: fake tensors need its type, its number and its current index, and nothing runs on it.
//
// It must be loaded before torch, which keeps the hooks that are registered when it first asks for them.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <dlfcn.h>

namespace {

// A torch built with CUDA registers a device when this library is loaded: so it is loaded before the lines below
// replace that device. Null for other torches.
[[maybe_unused]] void* const torch_cuda = dlopen("libtorch_cuda.so", RTLD_NOW);

constexpr c10::DeviceIndex kDevices = 64;
thread_local c10::DeviceIndex current = 0;

struct FakeGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    uncheckedSetDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {c10::DeviceType::CUDA, current}; }
  void setDevice(c10::Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current = device.index();
  }
  c10::Stream getStream(c10::Device device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return getStream(stream.device()); }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
};

const c10::impl::DeviceGuardImplRegistrar guard(c10::DeviceType::CUDA, new FakeGuard());

}  // namespace

namespace at {

// Without `override` where some torch since 2.4 does not have the function.
struct EtloomFakeCUDAHooks final : CUDAHooksInterface {
  explicit EtloomFakeCUDAHooks(CUDAHooksArgs) {}
  void initCUDA() const {}  // before 2.6
  void init() const {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const { return true; }
  bool isAvailable() const { return true; }
  bool hasPrimaryContext(DeviceIndex device) const override { return device == current; }
  DeviceIndex deviceCount() const override { return kDevices; }
  DeviceIndex getCurrentDevice() const override { return current; }
  DeviceIndex current_device() const override { return current; }
  int getNumGPUs() const override { return kDevices; }
  long versionCuDNN() const override { return 0; }
  long versionRuntimeCuDNN() const { return 0; }
  void deviceSynchronize(DeviceIndex) const override {}
};

C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, EtloomFakeCUDAHooks)

}  // namespace at

// Selects the device of this thread, as torch.cuda.set_device does.
extern "C" void etloom_set_device(int index) { current = static_cast<c10::DeviceIndex>(index); }
