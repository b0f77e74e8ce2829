// A CUDA device without hardware: fake tensors need its type, its number and its current index, and nothing runs on it.
//
// It must be loaded before torch, which keeps the hooks that are registered when it first asks for them.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

constexpr c10::DeviceIndex kDevices = 64;
thread_local c10::DeviceIndex current = 0;

struct FakeGuard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
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
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};

const c10::impl::DeviceGuardImplRegistrar guard(c10::DeviceType::CUDA, new FakeGuard());

}  // namespace

namespace at {

struct EtloomFakeCUDAHooks final : CUDAHooksInterface {
  explicit EtloomFakeCUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return false; }
  DeviceIndex deviceCount() const override { return kDevices; }
  DeviceIndex getCurrentDevice() const override { return current; }
  DeviceIndex current_device() const override { return current; }
  int getNumGPUs() const override { return kDevices; }
  void deviceSynchronize(DeviceIndex) const override {}
};

C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, EtloomFakeCUDAHooks)

}  // namespace at

// Selects the device of this thread, as torch.cuda.set_device does.
extern "C" void etloom_set_device(int index) { current = static_cast<c10::DeviceIndex>(index); }
