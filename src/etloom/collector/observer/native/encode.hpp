// Encodes IValues as a form (their structure, shared by many calls) and words (the values of one call).
#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>

#include "stream.hpp"

namespace etloom {

// Appends to stream.form and stream.words. Exceptions of torch pass through.
void encode(Stream& stream, c10::ArrayRef<c10::IValue> values);

// Communication details that torch's own observer does not record. Without torch.distributed both do nothing.
// Encodes a process group or a reduce operation; returns false for any other value.
bool encode_communication(Stream& stream, const c10::IValue& value);
// The details that torch attaches to a record_param_comms, in addition to its arguments, as JSON; empty if none.
std::string communication_details();

void append_json(std::string& out, std::string_view text);
void append_tag(Stream& stream, char tag, uint32_t number);

}  // namespace etloom
