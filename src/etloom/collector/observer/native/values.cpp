#include "values.hpp"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/aminmax.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <sys/stat.h>

#include <cstdio>
#include <cstdlib>
#include <sstream>

namespace etloom {

namespace {

// Wrapped tensors (of vmap, functionalization, Python subclasses, FakeTensorMode) have no values of their own.
bool has_values(const at::Tensor& tensor) {
  return tensor.defined() && at::isIntegralType(tensor.scalar_type(), /*includeBool=*/false) && tensor.has_storage() &&
         tensor.layout() == c10::kStrided && !tensor.is_meta() && !tensor.unsafeGetTensorImpl()->is_python_dispatch() &&
         !tensor.key_set().has_any(c10::DispatchKeySet({c10::DispatchKey::Functionalize,
                                                        c10::DispatchKey::FuncTorchBatched,
                                                        c10::DispatchKey::FuncTorchGradWrapper})) &&
         !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides() && tensor.numel() > 0;
}

void list_tensors(const c10::IValue& value, std::vector<at::Tensor>& tensors) {
  if (value.isTensor()) {
    tensors.push_back(value.toTensor());
  } else if (value.isTensorList() || value.isList()) {
    for (const c10::IValue& item : value.toListRef()) list_tensors(item, tensors);
  } else if (value.isTuple()) {
    for (const c10::IValue& item : value.toTupleRef().elements()) list_tensors(item, tensors);
  }
}

void write_file(const std::string& path, const at::Tensor& tensor) {
  const at::Tensor content = tensor.cpu().contiguous();
  std::FILE* const file = std::fopen(path.c_str(), "wbx");  // never through a link
  if (file == nullptr) return;
  const size_t bytes = content.nbytes();
  const bool complete = std::fwrite(content.const_data_ptr(), 1, bytes, file) == bytes;
  if (std::fclose(file) != 0 || !complete) std::remove(path.c_str());
}

}  // namespace

SavedValues::SavedValues(std::string folder)
    : ranges_(std::getenv("ENABLE_PYTORCH_EXECUTION_TRACE_SAVE_INTEGRAL_TENSOR_RANGE") != nullptr),
      folder_(std::move(folder)) {
  if (const char* names = std::getenv("ENABLE_PYTORCH_EXECUTION_TRACE_SAVE_INTEGRAL_TENSOR_DATA")) {
    std::istringstream list(names);
    for (std::string name; std::getline(list, name, ',');)
      if (!name.empty()) operators_.insert(name);
  }
  if (!operators_.empty()) mkdir(folder_.c_str(), 0777);
}

std::string SavedValues::save(const char* name, uint64_t handle, c10::ArrayRef<c10::IValue> inputs) const {
  const bool saves = operators_.count(name) != 0;
  std::vector<at::Tensor> tensors;
  for (const c10::IValue& input : inputs) list_tensors(input, tensors);
  // What runs below is not part of the job, whatever mode the job is in.
  const at::RecordFunctionGuard not_recorded(/*is_enabled=*/false);
  const at::NoGradGuard no_gradient;
  const c10::impl::ExcludeDispatchKeyGuard plain(c10::autograd_dispatch_keyset | c10::autocast_dispatch_keyset |
                                                 c10::python_ks |
                                                 c10::DispatchKeySet(c10::DispatchKey::PythonTLSSnapshot) |
                                                 c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView));
  std::string ranges;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!has_values(tensors[i])) continue;
    const std::string place = std::to_string(i);
    if (saves) write_file(folder_ + "/rf_" + std::to_string(handle) + "_tid_" + place + ".dat", tensors[i]);
    if (!ranges_) continue;
    const auto [low, high] = at::aminmax(tensors[i]);
    ranges += (ranges.empty() ? "\\\"" : ",\\\"") + place + "\\\":[" + std::to_string(low.item<int64_t>()) + "," +
              std::to_string(high.item<int64_t>()) + "]";
  }
  return ranges.empty() ? "" : "{\"tensor_range\":\"{" + ranges + "}\"}";
}

}  // namespace etloom
