// Ranges and contents of integer inputs, which torch's observer saves under two environment variables.
#pragma once

#include <ATen/core/ivalue.h>

#include <string>
#include <unordered_set>

namespace etloom {

class SavedValues {
 public:
  // Reads torch's environment variables; contents of tensors go to files in `folder`.
  explicit SavedValues(std::string folder);
  // Returns the ranges of the integer inputs of an operator as a JSON note, empty for none, and saves their contents.
  std::string save(const char* name, uint64_t handle, c10::ArrayRef<c10::IValue> inputs) const;
  bool enabled() const { return ranges_ || !operators_.empty(); }

 private:
  bool ranges_;
  std::unordered_set<std::string> operators_;
  std::string folder_;
};

}  // namespace etloom
