// IValues as a form (their structure, which repeats) and words (what differs from call to call).
#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>

#include "stream.hpp"

namespace etloom {

// Appends to stream.form and stream.words. Throws what torch throws.
void encode(Stream& stream, c10::ArrayRef<c10::IValue> values);

// What torch's own observer would not say of communication. Without torch.distributed both do nothing.
bool encode_communication(Stream& stream, const c10::IValue& value);  // a process group, a reduce operation
// The facts that a record_param_comms carries beside its arguments, as JSON; empty where there are none.
std::string communication_facts();

void append_json(std::string& out, std::string_view text);
void append_tag(Stream& stream, char tag, uint32_t number);

}  // namespace etloom
