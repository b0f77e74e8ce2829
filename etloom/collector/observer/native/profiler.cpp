// What torch's profiler holds, written without Python's lock: torch's own way to write it keeps every thread of the job
// waiting, some 5 us an operator.
#include <torch/csrc/autograd/profiler_kineto.h>

#include <exception>
#include <memory>
#include <string>
#include <typeinfo>

using torch::autograd::profiler::ProfilerResult;

extern "C" {

// For the capsule by which pybind11 hands out the C++ object of a Python one.
const void* etloom_result_type() { return &typeid(ProfilerResult); }
const char* etloom_result_name() { return typeid(ProfilerResult).name(); }
const char* etloom_type_name() { return typeid(std::type_info).name(); }

// Writes Kineto's file, and leaves an empty result behind: to let go of a large one takes as long as to write it.
// 0, or 1 where it failed.
int etloom_export(void* given, const char* path) {
  auto* result = static_cast<ProfilerResult*>(given);
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
