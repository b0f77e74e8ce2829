#include "operators.hpp"

#include <ATen/core/function_schema.h>

#include <cstring>
#include <exception>
#include <sstream>

#include "encode.hpp"
#include "session.hpp"

namespace etloom {

namespace {

struct Context : at::ObserverContext {
  Context(Stream* home, uint64_t handle, uint64_t window, bool pushed, int exceptions)
      : home(home), handle(handle), window(window), exceptions(exceptions), pushed(pushed) {}
  Stream* home;
  uint64_t handle, window;
  int exceptions;
  bool pushed;
};

// Keeps the running session alive for its scope: etloom_stop waits until `busy` is false.
struct SessionAccess {
  explicit SessionAccess(Stream* stream) : stream(stream) {
    stream->busy.store(true, std::memory_order_seq_cst);
    session = running.load(std::memory_order_seq_cst);
  }
  ~SessionAccess() { stream->busy.store(false, std::memory_order_release); }
  Stream* stream;
  Session* session;
};

struct NameInfo {
  uint32_t id;
  bool registered;  // as an operator of the dispatcher
  bool communicates;
};

// Returns the overload of an operator of the dispatcher, in `copy` if torch (before 2.8) returns a copy; else null.
template <typename Function>
const char* find_overload(const Function& function, std::string& copy) {
  if constexpr (requires { function.overload_name(); }) {
    static const char* const no_overload = Function().overload_name();
    const char* overload = function.overload_name();
    return overload == no_overload ? nullptr : overload;
  } else {
    const auto name = function.operator_name();
    if (!name) return nullptr;
    copy = name->overload_name;
    return copy.c_str();
  }
}

NameInfo define_name(Stream& stream, const at::RecordFunction& function) {
  std::string copy;
  const char* name = function.name();
  const char* overload = find_overload(function, copy);
  if (overload == nullptr) {
    return {stream.define(kName, name, [&] { return std::string_view(name); }, /*scope=*/true), false,
            std::string_view(name) == at::kParamCommsCallName};
  }
  Operator& cached = stream.cached_operator(name);
  if (cached.is(name, overload)) return {cached.id, true, cached.communicates};
  // Includes the overload: each overload has its own schema.
  const std::string key = std::string(name) + '\0' + overload;
  const uint32_t id = stream.define(kName, key, [&] {
    std::ostringstream text;
    text << key << '\0';
    if (const auto schema = function.operator_schema()) text << *schema;
    return text.str();
  });
  const bool communicates = std::string_view(name) == at::kParamCommsCallName;
  if (id != 0 && key.size() < sizeof cached.key) {
    cached = {name, id, static_cast<uint8_t>(std::strlen(name) + 1), communicates};
    std::memcpy(cached.key, key.c_str(), key.size() + 1);
  }
  return {id, true, communicates};
}

// Returns the text id of kernel_backend and kernel_file, which Triton's launcher passes as keywords; 0 for none.
uint32_t define_kernel(Stream& stream, const at::RecordFunction& function) {
  const auto keywords = function.kwinputs();
  const auto backend = keywords.find("kernel_backend");
  if (backend == keywords.end() || !backend->second.isString()) return 0;
  std::string text = "{\"kernel_backend\":";
  append_json(text, backend->second.toStringRef());
  const auto file = keywords.find("kernel_file");
  if (file != keywords.end() && file->second.isString()) {
    text += ",\"kernel_file\":";
    append_json(text, file->second.toStringRef());
  }
  return stream.text(text + "}");
}

// Encodes into the stream's scratch space. Returns the id of the form, 0 for no arguments; sets `omitted` if the
// arguments could not be recorded.
uint32_t encode_arguments(Stream& stream, c10::ArrayRef<c10::IValue> values, size_t head, bool& omitted) {
  stream.form.clear();
  stream.words.clear();
  if (values.empty()) return 0;
  File& file = stream.file();
  uint32_t form = 0;
  try {
    encode(stream, values);
    if (head + stream.words.size() > kPayloadWords) {
      file.count(kArgumentsOmitted);
    } else {
      const std::string_view code(stream.form.data(), stream.form.size());
      form = stream.define(kForm, code, [&] { return code; });
    }
  } catch (...) {
    file.count(kFailed);
  }
  omitted = form == 0;
  if (omitted) stream.words.clear();
  return form;
}

void note_values(Stream& stream, Session& session, const at::RecordFunction& function,
                 c10::ArrayRef<c10::IValue> inputs) {
  try {
    const std::string note = session.values.save(function.name(), function.handle(), inputs);
    if (!note.empty()) write_note(stream, function.handle(), stream.text(note));
  } catch (const std::exception&) {
    session.file->count(kFailed);
  }
}

}  // namespace

std::unique_ptr<at::ObserverContext> enter(const at::RecordFunction& function) {
  Stream* stream = stream_of_thread();
  if (stream == nullptr || stream->busy.load(std::memory_order_relaxed)) {
    // No session ends while the registry is locked or a stream is busy.
    const auto lock = stream == nullptr ? std::unique_lock(registry_mutex) : std::unique_lock<std::mutex>();
    if (Session* session = running.load()) session->file->count(stream == nullptr ? kThreadExiting : kReentrant);
    return nullptr;
  }
  const SessionAccess access(stream);
  if (access.session == nullptr) return nullptr;
  File& file = *access.session->file;
  const uint64_t window = current_window.load(std::memory_order_relaxed);
  join_window(*stream, file, window);
  const uint64_t handle = function.handle();
  const bool async = function.isAsync();
  Begin begin{};
  begin.handle = handle;
  begin.parent = stream->top();
  begin.sequence = function.seqNr();
  begin.forward_tid = static_cast<uint16_t>(function.forwardThreadId());
  begin.scope = static_cast<uint8_t>(function.scope());
  const NameInfo name = define_name(*stream, function);
  begin.name = name.id;
  bool omitted = false;
  // By address and size: torch before 2.5 does not convert its array of constant values.
  const auto inputs = function.inputs();
  const c10::ArrayRef<c10::IValue> values(inputs.data(), inputs.size());
  if (access.session->detail) begin.record.id = encode_arguments(*stream, values, sizeof begin / 8, omitted);
  else stream->words.clear();
  begin.record.type = kBegin;
  begin.record.flags = static_cast<uint8_t>((async ? kAsync : 0) | (omitted ? kWithoutArguments : 0));
  begin.record.words = static_cast<uint16_t>(sizeof begin / 8 + stream->words.size());
  begin.ns = monotonic_ns();
  if (!stream->write(begin)) {
    file.count(kNoSpace);
    return nullptr;
  }
  if (name.communicates) {
    write_note(*stream, handle, stream->text(communication_details()));
  } else if (access.session->detail && !name.registered && function.scope() == at::RecordScope::FUNCTION) {
    write_note(*stream, handle, define_kernel(*stream, function));
  }
  if (access.session->detail && access.session->values.enabled()) note_values(*stream, *access.session, function, values);
  if (!async) stream->push(handle);
  return std::make_unique<Context>(stream, handle, window, !async, std::uncaught_exceptions());
}

void leave(const at::RecordFunction& function, at::ObserverContext* opaque_context) {
  auto* context = static_cast<Context*>(opaque_context);
  Stream* stream = context == nullptr ? nullptr : stream_of_thread();
  if (stream == nullptr || stream->busy.load(std::memory_order_relaxed)) return;
  const int64_t now = monotonic_ns();
  const SessionAccess access(stream);
  if (access.session == nullptr) return;
  File& file = *access.session->file;
  const uint64_t window = current_window.load(std::memory_order_relaxed);
  if (context->window != window) {
    file.count(kEndedOutside);
    return;
  }
  join_window(*stream, file, window);
  if (stream != context->home) file.count(kEndedElsewhere);
  if (context->pushed) {
    stream == context->home ? stream->pop(context->handle) : context->home->pop_from_other_thread(context->handle);
  }
  const bool raised = std::uncaught_exceptions() > context->exceptions;
  if (raised) file.count(kRaised);
  bool omitted = false;
  End end{};
  if (access.session->detail && !raised)
    end.record.id = encode_arguments(*stream, function.outputs(), sizeof end / 8, omitted);
  else stream->words.clear();
  end.record.type = kEnd;
  end.record.flags = static_cast<uint8_t>((raised ? kEndRaised : 0) | (omitted ? kEndWithoutArguments : 0));
  end.record.words = static_cast<uint16_t>(sizeof end / 8 + stream->words.size());
  end.ns = now;
  end.handle = context->handle;
  if (!stream->write(end)) file.count(kNoSpace);
}

}  // namespace etloom
