// The decoder of observer files as Python sees it.
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "arrays.hpp"
#include "bindings.hpp"
#include "parse/observer.hpp"

namespace {

using namespace etloom::observer;

template <typename T>
nb::object array_of(etloom::Buffer<T>&& values) {
    auto* owner = new etloom::Buffer<T>(std::move(values));
    nb::capsule free_it(owner, [](void* p) noexcept { delete static_cast<etloom::Buffer<T>*>(p); });
    return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(owner->data(), {owner->size()}, free_it));
}

nb::dict columns_of(Operators&& from) {
    nb::dict columns;
    columns["handle"] = array_of(std::move(from.handle));
    columns["name"] = array_of(std::move(from.name));
    columns["start"] = array_of(std::move(from.start));
    columns["end"] = array_of(std::move(from.end));
    columns["seq_id"] = array_of(std::move(from.seq));
    columns["rf_tid"] = array_of(std::move(from.rf_tid));
    columns["os_tid"] = array_of(std::move(from.os_tid));
    columns["parent"] = array_of(std::move(from.parent));
    columns["fw_tid"] = array_of(std::move(from.fw_tid));
    columns["scope"] = array_of(std::move(from.scope));
    columns["has_end"] = array_of(std::move(from.has_end));
    columns["raised"] = array_of(std::move(from.raised));
    return columns;
}

nb::dict observer_records(In<uint64_t> words, size_t chunk_words, uint64_t declared) {
    Records records = [&] {
        nb::gil_scoped_release release;
        return read_records({words.data(), words.shape(0)}, chunk_words, declared);
    }();
    nb::dict all;
    all["damaged_chunks"] = nb::make_tuple(records.damaged_chunks, records.first_damaged_chunk);
    all["damaged_records"] = records.damaged_records;
    all["damaged_definitions"] = records.damaged_definitions;
    all["duplicates"] = records.duplicates;
    all["ends_without_begin"] = records.ends_without_begin;
    all["missing_parents"] = records.missing_parents;
    nb::list definitions, notes, windows, lists;
    for (const auto& [kind, stream, id, bytes] : records.definitions) {
        definitions.append(nb::make_tuple(kind, stream, id, nb::bytes(bytes.data(), bytes.size())));
    }
    for (const auto& [stream, id, handle] : records.notes) notes.append(nb::make_tuple(stream, id, handle));
    for (const auto& [opens, wall_ns] : records.windows) windows.append(nb::make_tuple(opens, wall_ns));
    for (auto& [key, first, size] : records.operators.lists) {
        lists.append(nb::make_tuple(array_of(std::move(key)), array_of(std::move(first)), array_of(std::move(size))));
    }
    all["forms"] = nb::cast(records.forms);
    all["definitions"] = definitions;
    all["notes"] = notes;
    all["windows"] = windows;
    all["lists"] = lists;
    all["operators"] = columns_of(std::move(records.operators));
    return all;
}

using Piece = std::variant<std::string, std::pair<std::string, uint32_t>>;
using FormParts = std::tuple<uint64_t, uint32_t, std::vector<Piece>, std::vector<std::pair<int32_t, bool>>>;

Form form_of(const FormParts& parts) {
    const auto& [key, words, pieces, tensors] = parts;
    Form form{key, words, {}, {}};
    for (const Piece& piece : pieces) {
        if (const auto* text = std::get_if<std::string>(&piece)) {
            form.pieces.push_back({*text, 0, 0});
        } else {
            const auto& [tag, word] = std::get<1>(piece);
            form.pieces.push_back({"", tag.empty() ? '?' : tag[0], word});
        }
    }
    for (const auto& [word, has_offset] : tensors) form.tensors.push_back({word, has_offset});
    if (!is_sound(form)) throw nb::value_error("a form has fewer words than it names");
    return form;
}

using List = std::tuple<In<uint64_t>, In<uint64_t>, In<int64_t>>;

void check(const List& list, size_t words, size_t rows) {
    const auto& [keys, first, sizes] = list;
    if (keys.shape(0) != rows || first.shape(0) != rows || sizes.shape(0) != rows) throw nb::value_error("a list per operator");
    for (size_t row = 0; row < rows; ++row) {
        if (first(row) > words || sizes(row) < 0 || static_cast<uint64_t>(sizes(row)) > words - first(row)) {
            throw nb::value_error("a list is outside of the file");
        }
    }
}

nb::dict observer_arguments(In<uint64_t> words, const std::array<List, 2>& lists, const std::vector<FormParts>& parts) {
    const size_t rows = std::get<0>(lists[0]).shape(0);
    std::vector<Form> forms;
    for (const FormParts& part : parts) forms.push_back(form_of(part));
    const auto& [in_keys, in_first, in_sizes] = lists[0];
    const auto& [out_keys, out_first, out_sizes] = lists[1];
    for (const List& list : lists) check(list, words.shape(0), rows);
    Arguments arguments = [&] {
        nb::gil_scoped_release release;
        return decode_arguments({words.data(), words.shape(0)}, {in_keys.data(), out_keys.data()},
                                {in_first.data(), out_first.data()}, {in_sizes.data(), out_sizes.data()}, rows, forms);
    }();
    nb::dict all;
    all["damaged"] = arguments.damaged;
    all["texts"] = nb::cast(arguments.texts);
    nb::list sides;
    for (auto& [form, text] : arguments.sides) sides.append(nb::make_tuple(array_of(std::move(form)), array_of(std::move(text))));
    all["sides"] = sides;
    all["operator"] = array_of(std::move(arguments.operators));
    all["tensor"] = array_of(std::move(arguments.tensor));
    all["address"] = array_of(std::move(arguments.address));
    all["storage"] = array_of(std::move(arguments.storage));
    all["version"] = array_of(std::move(arguments.version));
    all["offset"] = array_of(std::move(arguments.offset));
    return all;
}

nb::tuple observer_incarnations(In<uint64_t> address, In<int64_t> time, In<int64_t> begin, In<bool> is_created,
                                std::optional<In<int64_t>> version) {
    const size_t rows = address.shape(0);
    if (time.shape(0) != rows || begin.shape(0) != rows || is_created.shape(0) != rows || (version && version->shape(0) != rows) ||
        rows > UINT32_MAX) {
        throw nb::value_error("the columns differ in length");
    }
    Incarnations found = [&] {
        nb::gil_scoped_release release;
        return number_incarnations({address.data(), time.data(), begin.data(), reinterpret_cast<const uint8_t*>(is_created.data()),
                                    version ? version->data() : nullptr, rows});
    }();
    return nb::make_tuple(array_of(std::move(found.is_new)), array_of(std::move(found.number)));
}

}  // namespace

void bind_observer(nb::module_& module) {
    module.def("observer_records", &observer_records, nb::arg("words"), nb::arg("chunk_words"), nb::arg("declared"),
               "The records of an observer's file: operators by handle, definitions, notes, windows, and what is damaged.");
    module.def("observer_arguments", &observer_arguments, nb::arg("words"), nb::arg("lists"), nb::arg("forms"),
               "The arguments of its operators: a text and a form per list, and the tensors.");
    module.def("observer_incarnations", &observer_incarnations, nb::arg("address"), nb::arg("time"), nb::arg("begin"),
               nb::arg("is_created"), nb::arg("version").none(),
               "Of each use of an address whether it is that of a new object, and the number of the object.");
}
