// The parsers as Python sees them: bytes in, columns out as Arrow capsules, the GIL released while they work.
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include "bindings.hpp"
#include "outgoing.hpp"
#include "parse/parsers.hpp"

namespace nb = nanobind;

namespace {

using etloom::Parser;

// The bytes of an object, for as long as this lives.
class Borrowed {
  public:
    explicit Borrowed(const nb::object& from) {
        if (PyObject_GetBuffer(from.ptr(), &view_, PyBUF_SIMPLE) != 0) throw nb::python_error();
    }
    Borrowed(const Borrowed&) = delete;
    ~Borrowed() { PyBuffer_Release(&view_); }
    const char* data() const { return static_cast<const char*>(view_.buf); }
    size_t size() const { return static_cast<size_t>(view_.len); }

  private:
    Py_buffer view_;
};

void feed(Parser& parser, const nb::object& from) {
    const Borrowed bytes(from);
    nb::gil_scoped_release release;
    parser.feed(bytes.data(), bytes.size());
}

nb::object room(Parser& parser, size_t size) {
    if (size > size_t{1} << 40) throw nb::value_error("more room than any machine has");
    return nb::steal(PyMemoryView_FromMemory(parser.room(size), static_cast<Py_ssize_t>(size), PyBUF_WRITE));
}

nb::dict take(Parser& parser) {
    nb::dict tables;
    for (auto& [name, table] : parser.tables()) {
        nb::dict columns;
        for (auto& named : table.columns()) {
            auto column = std::make_unique<Outgoing>();
            named.column->leave(&column->schema, &column->array);
            columns[named.name] = nb::cast(std::move(column));
        }
        tables[name.c_str()] = columns;
    }
    return tables;
}

// Bytes, since a damaged file may hold any.
nb::bytes to_bytes(const std::string& text) { return nb::bytes(text.data(), text.size()); }

nb::dict summary(const Parser& parser) {
    nb::list header;
    for (const auto& [key, value] : parser.header()) header.append(nb::make_tuple(to_bytes(key), to_bytes(value)));
    nb::dict troubles;
    const auto note = [&](const char* name, const etloom::Trouble& trouble) {
        if (trouble.count > 0) troubles[name] = nb::make_tuple(trouble.count, to_bytes(trouble.example));
    };
    note("invalid_event", parser.damaged());
    for (const auto& [name, trouble] : parser.troubles()) note(name.c_str(), trouble);
    nb::dict all;
    all["rows"] = parser.rows_seen();
    all["bytes"] = parser.bytes();
    all["found_rows"] = parser.found_rows();
    all["truncated"] = parser.truncated();
    all["trailing"] = parser.trailing();
    all["header"] = header;
    all["troubles"] = troubles;
    return all;
}

}  // namespace

void bind_parsers(nb::module_& module) {
    nb::class_<Outgoing>(module, "Column", "A column that Arrow libraries can take, once.")
        .def("__arrow_c_array__", &capsules, nb::arg("requested_schema") = nb::none());
    nb::class_<Parser>(module, "Parser", "Trace bytes in (feed, finish), tables out (take).")
        .def("feed", &feed, nb::arg("data"), "Read the next bytes of the file.")
        .def("room", &room, nb::arg("size"), nb::keep_alive<0, 1>(),
             "The memory for the next bytes of the file, valid until the parser is used again.")
        .def("extend", &Parser::extend, nb::arg("size"), nb::call_guard<nb::gil_scoped_release>(),
             "Read that many bytes, which were written to `room`.")
        .def("finish", [](Parser& parser) {
            nb::gil_scoped_release release;
            parser.finish();
            parser.sort();
        }, "The file is over.")
        .def("cut", [](Parser& parser) {
            nb::gil_scoped_release release;
            parser.sort();
        }, "Order what was read so far, to take it before the file is over; ids then start at 0 again.")
        .def("split_from", &Parser::split_from, nb::arg("bytes"),
             "Have two threads parse pieces of at least that many bytes; 0: large ones, where a processor is idle.")
        .def("only_by_tokens", &Parser::only_by_tokens,
             "Read all rows by their tokens, as a reference for rows of a known layout.")
        .def_prop_ro("known_rows", &Parser::known_rows, "Rows that were read without tokens.")
        .def_prop_ro("rows", &Parser::rows_seen, "Rows seen so far.")
        .def("summary", &summary, "Rows seen, header members, and what went wrong.")
        .def("take", &take, "The tables as {name: {column: Column}}, once.");
    module.def("kineto_parser", &etloom::kineto_parser, "A parser of Kineto / Chrome trace JSON.");
    module.def("execution_trace_parser", &etloom::execution_trace_parser, "A parser of PyTorch execution traces.");
}
