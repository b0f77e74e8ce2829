// The parsers as Python sees them: bytes in, columns out as Arrow capsules, the GIL released while they work.
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <fstream>

#include "bindings.hpp"
#include "outgoing.hpp"
#include "parse/parsers.hpp"
#include "parse/perfetto.hpp"
#include "parse/perfetto_writer.hpp"
#include "parse/sqlite_table.hpp"

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

nb::dict take(etloom::Tables& from) {
    nb::dict tables;
    for (auto& [name, table] : from) {
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

nb::list to_list(const std::vector<std::pair<std::string, std::string>>& members) {
    nb::list header;
    for (const auto& [key, value] : members) header.append(nb::make_tuple(to_bytes(key), to_bytes(value)));
    return header;
}

nb::dict to_dict(const etloom::Troubles& from) {
    nb::dict troubles;
    for (const auto& [name, trouble] : from) {
        if (trouble.count > 0) troubles[name.c_str()] = nb::make_tuple(trouble.count, to_bytes(trouble.example));
    }
    return troubles;
}

nb::dict summary(const Parser& parser) {
    nb::dict troubles = to_dict(parser.troubles());
    if (const etloom::Trouble& damaged = parser.damaged(); damaged.count > 0) {
        troubles["invalid_event"] = nb::make_tuple(damaged.count, to_bytes(damaged.example));
    }
    nb::dict all;
    all["rows"] = parser.rows_seen();
    all["bytes"] = parser.bytes();
    all["found_rows"] = parser.found_rows();
    all["truncated"] = parser.truncated();
    all["trailing"] = parser.trailing();
    all["header"] = to_list(parser.header());
    all["troubles"] = troubles;
    return all;
}

nb::list find_compressed(const nb::object& from) {
    const Borrowed bytes(from);
    nb::list all;
    for (const auto& [start, end, data, size, is_zstd] : etloom::perfetto::find_compressed({bytes.data(), bytes.size()})) {
        all.append(nb::make_tuple(start, end, data, size, is_zstd));
    }
    return all;
}

nb::tuple read_perfetto(const nb::object& from, size_t max_rows) {
    const Borrowed bytes(from);
    const auto trace = [&] {
        nb::gil_scoped_release release;
        return std::make_unique<etloom::perfetto::Trace>(std::string_view(bytes.data(), bytes.size()), max_rows);
    }();
    nb::dict all;
    all["packets"] = trace->packets;
    all["rows"] = trace->rows;
    all["damaged"] = trace->damaged;
    all["trailing"] = trace->trailing;
    all["is_cut"] = trace->is_cut;
    all["epoch"] = trace->epoch;
    all["header"] = to_list(trace->header);
    all["troubles"] = to_dict(trace->troubles);
    nb::dict packets, fields;
    for (const auto& [number, count] : trace->unread_packets) packets[nb::int_(number)] = count;
    for (const auto& [number, count] : trace->unread_fields) fields[nb::int_(number)] = count;
    all["unread_packets"] = packets;
    all["unread_fields"] = fields;
    return nb::make_tuple(take(trace->tables), all);
}

// The columns of a table, the number of rows, and of values of another type by column; None: SQLite has to read it.
nb::object read_sqlite_table(const nb::bytes& path, uint64_t file_bytes, uint32_t root,
                             const std::vector<std::tuple<std::string, size_t, uint8_t, bool, bool>>& columns, uint64_t max_rows) {
    using namespace etloom::sqlite;
    std::vector<Wanted> wanted;
    for (const auto& [name, place, type, is_row_number, has_default] : columns) {
        wanted.push_back({name, place, static_cast<Type>(type), is_row_number, has_default});
    }
    std::ifstream file;
    file.rdbuf()->pubsetbuf(nullptr, 0);  // pages are read as a whole
    file.open(std::string(path.c_str(), path.size()), std::ios::binary);
    const auto read_at = [&](uint64_t at, char* into, size_t size) {
        return static_cast<bool>(file.seekg(static_cast<std::streamoff>(at)).read(into, static_cast<std::streamsize>(size)));
    };
    TableReader reader(read_at, file_bytes, wanted);
    {
        nb::gil_scoped_release release;
        if (!file || !reader.read(root, max_rows)) return nb::none();
    }
    return nb::make_tuple(take(reader.tables)["rows"], reader.rows, reader.wrong_type_counts);
}

using PerfettoWriter = etloom::perfetto::Writer;

nb::bytes add_events(PerfettoWriter& writer, const nb::object& from) {
    const Borrowed bytes(from);
    std::string packets;
    {
        nb::gil_scoped_release release;
        packets = writer.add({bytes.data(), bytes.size()});
    }
    return to_bytes(packets);
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
        .def("take", [](Parser& parser) { return take(parser.tables()); }, "The tables as {name: {column: Column}}, once.");
    module.def("kineto_parser", &etloom::kineto_parser, "A parser of Kineto / Chrome trace JSON.");
    module.def("execution_trace_parser", &etloom::execution_trace_parser, "A parser of PyTorch execution traces.");
    module.def("find_compressed_packets", &find_compressed, nb::arg("data"),
               "(from, to, data, size, is_zstd) of each compressed packet of a Perfetto trace.");
    module.def("read_perfetto", &read_perfetto, nb::arg("data"), nb::arg("max_rows"),
               "The tables of a Perfetto trace, as those of `Parser.take`, and a summary.");
    module.def("read_sqlite_table", &read_sqlite_table, nb::arg("path"), nb::arg("file_bytes"), nb::arg("root"), nb::arg("columns"),
               nb::arg("max_rows"), "Columns of a table of a SQLite file; None if SQLite has to read it.");
    nb::class_<PerfettoWriter>(module, "PerfettoWriter", "Events of a Chrome trace in, packets of a Perfetto trace out.")
        .def(nb::init<>())
        .def("start", [](PerfettoWriter& writer, int64_t epoch) { return to_bytes(writer.start(epoch)); }, nb::arg("epoch"),
             "The first packet; times count from `epoch` (ns since 1970; 0: not known).")
        .def("member", [](PerfettoWriter& writer, const std::string& key, const std::string& json) {
            return to_bytes(writer.member(key, json));
        }, nb::arg("key"), nb::arg("json"), "The packet of a member next to the events.")
        .def("add", &add_events, nb::arg("events"), "The packets of JSON events separated by commas.")
        .def_prop_ro("damaged", &PerfettoWriter::damaged, "Events that could not be read.");
}
