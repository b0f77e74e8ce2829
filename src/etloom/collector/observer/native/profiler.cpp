// Writes the result of torch's profiler without the GIL. torch's own export holds the GIL, which blocks every thread of
// the job for some 5 us per operator.
#include <torch/csrc/autograd/profiler_kineto.h>

#include <exception>
#include <memory>
#include <string>
#include <typeinfo>

using torch::autograd::profiler::ProfilerResult;

extern "C" {

// Type information for the capsule through which pybind11 exposes the C++ object behind a Python object.
const void* etloom_result_type() { return &typeid(ProfilerResult); }
const char* etloom_result_name() { return typeid(ProfilerResult).name(); }
const char* etloom_type_name() { return typeid(std::type_info).name(); }

// Writes Kineto's file and leaves an empty result: freeing a large one takes as long as writing it, so it is done here,
// without the GIL. Returns 0, or 1 on failure.
int etloom_export(void* handle, const char* path) {
  auto* result = static_cast<ProfilerResult*>(handle);
  try {
    result->save(path);
  } catch (const std::exception&) {
    return 1;
  }
  std::destroy_at(result);
  std::construct_at(result);
  return 0;
}
}
