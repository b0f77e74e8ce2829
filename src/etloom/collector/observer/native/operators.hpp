// The callbacks around every operator of the process.
#pragma once

#include <ATen/record_function.h>

#include <memory>

namespace etloom {

std::unique_ptr<at::ObserverContext> enter(const at::RecordFunction& function);
void leave(const at::RecordFunction& function, at::ObserverContext* opaque_context);

}  // namespace etloom
