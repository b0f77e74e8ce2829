// The parsers there are.
#pragma once
#include <memory>

#include "parser.hpp"

namespace etloom {

std::unique_ptr<Parser> kineto_parser();
std::unique_ptr<Parser> execution_trace_parser();

}  // namespace etloom
