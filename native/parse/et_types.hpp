// The types of arguments as an execution trace writes them: GenericList[Tensor(float),Int].
#pragma once
#include <cstdint>
#include <string_view>
#include <vector>

namespace etloom::et {

struct Type {
    enum class Is : uint8_t { kScalar, kTensor, kList } is = Is::kScalar;
    std::string_view dtype;     // of a tensor
    uint32_t dtype_code = 0;    // for whoever keeps the dtypes
    std::vector<Type> items;
    bool holds_tensor = false;
};

// The types in a JSON list of such texts, taken apart. They point into the text.
std::vector<Type> types_in(std::string_view json);

}  // namespace etloom::et
