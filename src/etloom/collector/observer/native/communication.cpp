#include "encode.hpp"

#include <ATen/core/jit_type.h>

#ifdef USE_C10D
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#endif

namespace etloom {

#ifdef USE_C10D

namespace {

const char* reduce_name(const c10d::ReduceOp& operation) {
  constexpr const char* names[] = {"sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum"};
  const auto number = static_cast<size_t>(operation.op_);
  return number < std::size(names) ? names[number] : "unused";
}

// Number of operations the group has begun. Not every backend counts them, and the default backend may be missing.
uint64_t sequence_number(c10d::ProcessGroup& group) {
  try {
    return group.getSequenceNumberForGroup();
  } catch (const std::exception&) {
    return ~0ull;
  }
}

std::string group_json(c10d::ProcessGroup& group) {
  std::string text = "{\"pg_name\":";
  append_json(text, group.getGroupName());
  text += ",\"pg_desc\":";
  append_json(text, group.getGroupDesc());
  return text + ",\"group_size\":" + std::to_string(group.getSize()) + ",\"rank\":" + std::to_string(group.getRank()) + "}";
}

void append_member(std::string& out, const char* name, const std::string& value) {
  out += out.empty() ? "{\"" : ",\"";
  out += name;
  out += "\":" + value;
}

std::string json_string(std::string_view text) {
  std::string out;
  append_json(out, text);
  return out;
}

std::string json_list(const std::vector<int64_t>& numbers) {
  std::string out = "[";
  for (const int64_t number : numbers) out += (out.size() > 1 ? "," : "") + std::to_string(number);
  return out + "]";
}

}  // namespace

bool encode_communication(Stream& stream, const c10::IValue& value) {
  if (!value.isObject()) return false;
  // Compare types first: toCustomClass throws for any other class.
  const auto* type = value.toObjectRef().type().get();
  static const auto* const group_type = c10::getCustomClassType<c10::intrusive_ptr<c10d::ProcessGroup>>().get();
  static const auto* const reduce_type = c10::getCustomClassType<c10::intrusive_ptr<c10d::ReduceOp>>().get();
  if (type == group_type) {
    const auto group = value.toCustomClass<c10d::ProcessGroup>();
    append_tag(stream, 'G', stream.text(group_json(*group)));
    stream.words.push(sequence_number(*group));
    return true;
  }
  if (type == reduce_type) {
    append_tag(stream, 'R', stream.text(reduce_name(*value.toCustomClass<c10d::ReduceOp>())));
    return true;
  }
  return false;
}

// torch says whether a call is asynchronous since 2.12.
template <typename Info>
void append_is_async(std::string& out, const Info& info) {
  if constexpr (requires { info.isAsynchronizedOp(); }) {
    append_member(out, "is_async", info.isAsynchronizedOp() ? "true" : "false");
  }
}

std::string communication_details() {
  const auto* info = dynamic_cast<const torch::ParamCommsDebugInfo*>(
      c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PARAM_COMMS_INFO));
  std::string out;
  if (info == nullptr) return out;
  append_member(out, "collective", json_string(info->getCollectiveName()));
  append_member(out, "dtype", json_string(c10::toString(info->getDType())));
  append_member(out, "in_nelems", std::to_string(info->getInMessageNelems()));
  append_member(out, "out_nelems", std::to_string(info->getOutMessageNelems()));
  append_member(out, "in_split", json_list(info->getInputSplitSizes()));
  append_member(out, "out_split", json_list(info->getOutputSplitSizes()));
  append_member(out, "rank_start", std::to_string(info->getGlobalRankStart()));
  append_member(out, "rank_stride", std::to_string(info->getGlobalRankStride()));
  append_member(out, "pg_name", json_string(info->getProcessGroupName()));
  append_member(out, "pg_desc", json_string(info->getProcessGroupDesc()));
  append_member(out, "group_size", std::to_string(info->getWorldSize()));
  append_is_async(out, *info);
  return out + "}";
}

#else

bool encode_communication(Stream&, const c10::IValue&) { return false; }
std::string communication_details() { return {}; }

#endif

}  // namespace etloom
