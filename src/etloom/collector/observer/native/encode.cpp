#include "encode.hpp"

#include <ATen/core/Tensor.h>
#include <ATen/core/jit_type.h>

#include <sstream>

namespace etloom {

namespace {

struct LayoutKey {  // looked up for every tensor; only a new layout is written as JSON
  int16_t dtype;
  int8_t device_type, device_index;
  uint8_t sized, strided;
  uint16_t dimensions;
};

template <class Numbers>
void append_list(std::string& out, const Numbers& numbers) {
  out += '[';
  for (const auto number : numbers) {
    if (out.back() != '[') out += ',';
    out += std::to_string(number);
  }
  out += ']';
}

uint32_t define_layout(Stream& stream, const c10::TensorImpl& tensor) {
  const bool symbolic = tensor.has_symbolic_sizes_strides() || tensor.is_nested();
  const c10::Device device = tensor.device();
  const bool strided = !symbolic && tensor.layout() == c10::kStrided;
  LayoutKey head{static_cast<int16_t>(c10::typeMetaToScalarType(tensor.dtype())),
                 static_cast<int8_t>(device.type()),
                 device.index(),
                 !symbolic,
                 strided,
                 0};
  c10::IntArrayRef sizes, strides;
  if (symbolic) {
    stream.file().count(kUnsized);
  } else {
    sizes = tensor.sizes();
    if (strided) strides = tensor.strides();
    head.dimensions = static_cast<uint16_t>(sizes.size());
  }
  int64_t short_key[1 + 16];
  std::vector<int64_t> long_key;
  int64_t* key = short_key;
  const size_t length = 1 + sizes.size() + strides.size();
  if (length > std::size(short_key)) {
    long_key.resize(length);
    key = long_key.data();
  }
  static_assert(sizeof head == sizeof *key);
  std::memcpy(key, &head, sizeof head);
  int64_t* at = key + 1;
  for (const int64_t size : sizes) *at++ = size;
  for (const int64_t stride : strides) *at++ = stride;
  return stream.define(kLayout, {reinterpret_cast<const char*>(key), length * sizeof *key}, [&] {
    std::string text = "{\"dtype\":";
    append_json(text, std::string(tensor.dtype().name()));
    text += ",\"itemsize\":" + std::to_string(tensor.itemsize()) + ",\"device\":";
    append_json(text, device.str());
    text += ",\"shape\":";
    symbolic ? void(text += "null") : append_list(text, sizes);
    text += ",\"stride\":";
    strided ? append_list(text, strides) : void(text += "null");
    return text + "}";
  });
}

void encode_tensor(Stream& stream, const at::Tensor& tensor) {
  if (!tensor.defined()) {
    stream.form.push('U');
    return;
  }
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  const uint32_t layout = define_layout(stream, impl);
  const bool has_storage = impl.has_storage();
  const int64_t offset = has_storage && !impl.has_symbolic_sizes_strides() ? impl.storage_offset() : 0;
  append_tag(stream, offset == 0 ? 'T' : 'O', layout);
  const auto storage = has_storage ? impl.unsafe_storage().unsafeGetStorageImpl() : nullptr;
  const auto& counter = const_cast<c10::TensorImpl&>(impl).version_counter();
  uint64_t* const words = stream.words.extend(offset == 0 ? 3 : 4);
  words[0] = reinterpret_cast<uintptr_t>(&impl);
  words[1] = reinterpret_cast<uintptr_t>(storage);
  words[2] = counter.enabled() ? counter.current_version() : 0;
  if (offset != 0) words[3] = static_cast<uint64_t>(offset);
}

void push_double(Stream& stream, double value) { stream.words.push(std::bit_cast<uint64_t>(value)); }

void encode_value(Stream& stream, const c10::IValue& value);

// The form of a list of plain numbers holds its length only, so that it repeats; other lists add a tag for each item.
void encode_list(Stream& stream, c10::ArrayRef<c10::IValue> items, char tag) {
  if (items.size() > kLongestList) {
    items = items.slice(0, kLongestList);
    stream.file().count(kListsCut);
  }
  const bool numbers = tag == 'L' && !items.empty() && (items[0].isInt() || items[0].isDouble());
  if (numbers && items[0].isInt() == items.back().isInt() && !items.back().isNone()) {
    const bool integers = items[0].isInt();
    bool same_type = true;
    for (const c10::IValue& item : items) same_type = same_type && (integers ? item.isInt() : item.isDouble());
    if (same_type) {
      append_tag(stream, integers ? 'I' : 'D', static_cast<uint32_t>(items.size()));
      for (const c10::IValue& item : items) {
        integers ? stream.words.push(static_cast<uint64_t>(item.toInt())) : push_double(stream, item.toDouble());
      }
      return;
    }
  }
  append_tag(stream, tag, static_cast<uint32_t>(items.size()));
  for (const c10::IValue& item : items) encode_value(stream, item);
}

void encode_value(Stream& stream, const c10::IValue& value) {
  if (value.isTensor()) {
    encode_tensor(stream, value.toTensor());
  } else if (value.isInt()) {
    stream.form.push('i');
    stream.words.push(static_cast<uint64_t>(value.toInt()));
  } else if (value.isNone()) {
    stream.form.push('N');
  } else if (value.isBool()) {
    stream.form.push(value.toBool() ? 't' : 'f');
  } else if (value.isDouble()) {
    stream.form.push('d');
    push_double(stream, value.toDouble());
  } else if (value.isList()) {
    encode_list(stream, value.toListRef(), 'L');
  } else if (value.isTuple()) {
    encode_list(stream, value.toTupleRef().elements(), '(');
  } else if (value.isString()) {
    append_tag(stream, 's', stream.text(value.toStringRef()));
  } else if (value.isDevice()) {
    append_tag(stream, 'v', stream.text(value.toDevice().str()));
  } else if (value.isComplexDouble()) {
    stream.form.push('c');
    push_double(stream, value.toComplexDouble().real());
    push_double(stream, value.toComplexDouble().imag());
  } else if (!encode_communication(stream, value)) {
    append_tag(stream, 'o', stream.text(value.tagKind()));
  }
}

}  // namespace

void append_tag(Stream& stream, char tag, uint32_t number) {
  char* const at = stream.form.extend(1 + sizeof number);
  *at = tag;
  std::memcpy(at + 1, &number, sizeof number);
}

void append_json(std::string& out, std::string_view text) {
  out += '"';
  for (const char letter : text) {
    const auto code = static_cast<unsigned char>(letter);
    if (letter == '"' || letter == '\\') {
      out += '\\';
      out += letter;
    } else if (code < 0x20) {
      char escaped[8];
      std::snprintf(escaped, sizeof escaped, "\\u%04x", code);
      out += escaped;
    } else {
      out += letter;
    }
  }
  out += '"';
}

void encode(Stream& stream, c10::ArrayRef<c10::IValue> values) {
  for (const c10::IValue& value : values) encode_value(stream, value);
}

}  // namespace etloom
