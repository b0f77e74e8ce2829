// Memory snapshots as Python sees them: pieces of a pickle in, columns of the history and a few small values out.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <unordered_map>

#include "arrays.hpp"
#include "bindings.hpp"
#include "parse/snapshot_pickle.hpp"

namespace {

using etloom::SnapshotParser;
using Value = SnapshotParser::Value;

nb::object to_text(const std::string& text) {
    return nb::steal(PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
}

// Converts values to Python's, shared ones as often as they occur, up to a number of them.
class Converter {
  public:
    Converter(const SnapshotParser& from, size_t most) : parser(from), left(most) {}

    nb::object convert(const Value& given, int depth = 0) {
        if (left-- == 0 || depth > 50) throw nb::value_error("contains the same values many times");
        const Value value = parser.resolve(given);
        switch (value.type) {
            case SnapshotParser::BOOL: return nb::bool_(value.number != 0);
            case SnapshotParser::INT:
            case SnapshotParser::STACK: return nb::int_(static_cast<int64_t>(value.number));
            case SnapshotParser::REAL: return nb::float_(parser.real(value));
            case SnapshotParser::TEXT: return to_text(parser.text(value));
            case SnapshotParser::DICT: {
                nb::dict dict;
                for (const auto& [key, item] : *parser.pairs(value))
                    if (key.type == SnapshotParser::TEXT) dict[to_text(parser.text(key))] = convert(item, depth + 1);
                return dict;
            }
            case SnapshotParser::LIST:
            case SnapshotParser::TUPLE: {
                nb::list list;
                for (const Value& item : *parser.items(value)) list.append(convert(item, depth + 1));
                return list;
            }
            default: return nb::none();
        }
    }

  private:
    const SnapshotParser& parser;
    size_t left;
};

void feed(SnapshotParser& parser, nb::bytes piece) {
    const char* const data = piece.c_str();
    const size_t size = piece.size();
    nb::gil_scoped_release release;
    parser.feed(data, size);
}

template <typename T>
nb::object take(std::vector<T>& column) {
    return nb::cast(to_numpy(std::move(column)));
}

// A dict of what the snapshot contains except its history, which is columns: of each entry of device_traces its device,
// its row (None if they are in order), and of each row its fields. `frames` has the dict of each frame, `stacks` the
// frames of each stack.
nb::dict finish(SnapshotParser& parser) {
    const Value root = parser.finish();
    parser.forget();
    nb::dict result;
    const SnapshotParser::Pairs* const fields = parser.pairs(root);
    if (fields == nullptr) return result;
    Converter converter(parser, parser.consumed() + 1000);
    nb::dict rest;
    for (const auto& [key, value] : *fields)
        if (key.type == SnapshotParser::TEXT && parser.text(key) != "device_traces")
            rest[to_text(parser.text(key))] = converter.convert(value);
    result["rest"] = rest;
    const Value* const traces = parser.find(*fields, "device_traces");
    const SnapshotParser::Items* const devices = traces == nullptr ? nullptr : parser.items(*traces);
    if (devices == nullptr) return result;
    Paged<int32_t> device, row;
    size_t entries = 0, damaged = 0;
    for (const Value& list : *devices)
        if (const auto* items = parser.items(list)) entries += items->size();
    if (entries > parser.consumed()) throw nb::value_error("contains the same lists of entries many times");
    for (size_t i = 0; i < devices->size(); ++i) {
        const auto* items = parser.items((*devices)[i]);
        if (items == nullptr) continue;
        for (const Value& item : *items) {
            const bool is_row = item.type == SnapshotParser::ROW;
            damaged += !is_row;
            if (!is_row) continue;
            device.push_back(static_cast<int32_t>(i));
            row.push_back(static_cast<int32_t>(item.number));
        }
    }
    std::unordered_map<int32_t, int32_t> number_of_frame;
    nb::list frames, stacks, texts;
    Converter frame_converter(parser, parser.consumed() + 1000);
    for (auto& stack : parser.stacks) {
        nb::list numbers;
        for (int32_t frame : stack) {
            Value dict;
            dict.type = SnapshotParser::DICT;
            dict.number = frame;
            const auto [it, is_new] = number_of_frame.try_emplace(frame, static_cast<int32_t>(number_of_frame.size()));
            if (is_new) frames.append(frame_converter.convert(dict));
            numbers.append(it->second);
        }
        stacks.append(numbers);
    }
    for (const std::string* text : parser.texts()) texts.append(to_text(*text));
    result["damaged"] = damaged;
    result["devices"] = devices->size();
    result["device"] = nb::cast(to_numpy(std::move(device)));
    bool in_order = row.size() == parser.time.size();
    for (size_t i = 0; i < row.size() && in_order; ++i) in_order = static_cast<size_t>(row[i]) == i;
    result["row"] = in_order ? nb::none() : nb::object(nb::cast(to_numpy(std::move(row))));
    result["time"] = take(parser.time);
    result["addr"] = take(parser.address);
    result["size"] = take(parser.size);
    result["stream"] = take(parser.stream);
    result["device_free"] = take(parser.device_free);
    result["action"] = take(parser.action);
    result["stack"] = take(parser.stack);
    result["annotation"] = take(parser.annotation);
    result["pool"] = take(parser.pool);
    result["frames"] = frames;
    result["stacks"] = stacks;
    result["texts"] = texts;
    parser.clear();
    return result;
}

}  // namespace

void bind_snapshot(nb::module_& module) {
    nb::class_<SnapshotParser>(module, "SnapshotParser")
        .def(nb::init<>())
        .def("feed", &feed, nb::arg("piece"), "Read the next piece of the pickle; RuntimeError if it is damaged.")
        .def("finish", &finish, "What the snapshot contains; ValueError if it repeats lists many times.");
}
