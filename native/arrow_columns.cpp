// Columns of integers that an Arrow library exports, as numpy arrays: null replaced by a number, or a mask of the rows
// that are not null. Also converts row numbers to a column.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include <nanobind/stl/unique_ptr.h>

#include "arrays.hpp"
#include "bindings.hpp"
#include "outgoing.hpp"
#include "parse/arrow_c.hpp"

namespace {

// The eight bits of each byte, from the lowest.
constexpr auto BITS = [] {
    std::array<std::array<uint8_t, 8>, 256> bits{};
    for (size_t byte = 0; byte < 256; ++byte) {
        for (size_t bit = 0; bit < 8; ++bit) bits[byte][bit] = byte >> bit & 1;
    }
    return bits;
}();

// The chunks of an exported column, one after the other.
class Chunks {
  public:
    explicit Chunks(const nb::object& column) : capsule_(column.attr("__arrow_c_stream__")()) {
        stream_ = static_cast<ArrowArrayStream*>(PyCapsule_GetPointer(capsule_.ptr(), "arrow_array_stream"));
        if (stream_ == nullptr) throw nb::python_error();
        if (stream_->get_schema(stream_, &schema_) != 0) throw nb::value_error("the type of the column cannot be exported");
    }
    Chunks(const Chunks&) = delete;
    ~Chunks() {
        release(chunk_);
        release(schema_);
    }
    std::string format() const { return schema_.format; }
    // Goes to the next chunk; false after the last one.
    bool next() {
        release(chunk_);
        chunk_ = ArrowArray{};
        if (stream_->get_next(stream_, &chunk_) != 0) throw nb::value_error("the values of the column cannot be exported");
        if (chunk_.release == nullptr) return false;
        if (chunk_.n_buffers < 1 || chunk_.length < 0 || chunk_.offset < 0) throw nb::value_error("not a column of values");
        return true;
    }
    size_t rows() const { return static_cast<size_t>(chunk_.length); }
    template <typename T>
    const T* values() const {
        if (chunk_.n_buffers != 2) throw nb::value_error("not a column of integers");
        return static_cast<const T*>(chunk_.buffers[1]) + chunk_.offset;
    }
    // True if no row is null, so that there may be no bitmap.
    bool is_complete() const {
        if (chunk_.buffers[0] == nullptr && chunk_.null_count > 0) throw nb::value_error("a column of another type");
        return chunk_.null_count == 0 || chunk_.buffers[0] == nullptr;
    }
    // Writes for each row whether it is not null, as 1 or 0.
    void write_validity(uint8_t* out) const {
        const size_t count = rows();
        if (is_complete()) {
            std::fill(out, out + count, uint8_t{1});
            return;
        }
        const auto* const bitmap = static_cast<const uint8_t*>(chunk_.buffers[0]);
        const auto offset = static_cast<size_t>(chunk_.offset);
        const auto one = [&](size_t row) { out[row] = bitmap[(row + offset) / 8] >> ((row + offset) % 8) & 1; };
        size_t row = 0;
        for (; row < count && (row + offset) % 8 != 0; ++row) one(row);
        for (; row + 8 <= count; row += 8) std::memcpy(out + row, BITS[bitmap[(row + offset) / 8]].data(), 8);
        for (; row < count; ++row) one(row);
    }

  private:
    template <typename Exported>
    static void release(Exported& exported) {
        if (exported.release != nullptr) exported.release(&exported);
    }

    nb::object capsule_;
    ArrowArrayStream* stream_ = nullptr;
    ArrowSchema schema_{};
    ArrowArray chunk_{};
};

template <typename Value, typename Result>
void append_filled(const Chunks& chunk, Result null, Paged<uint8_t>& validity, Paged<Result>& result) {
    const Value* const values = chunk.values<Value>();
    const size_t before = result.size(), rows = chunk.rows();
    result.resize(before + rows);
    validity.resize(rows);
    chunk.write_validity(validity.data());
    const uint8_t* const valid = validity.data();
    Result* const out = result.data() + before;
    for (size_t row = 0; row < rows; ++row) {
        const auto mask = -static_cast<Result>(valid[row]);  // no branch: nulls may be anywhere
        out[row] = (static_cast<Result>(values[row]) & mask) | (null & ~mask);
    }
}

// The integers of a column, those that do not fit reduced to the lower bits, with a number for null.
template <typename Result>
nb::ndarray<nb::numpy, Result, nb::ndim<1>> filled(const nb::object& column, Result null) {
    Chunks chunks(column);
    const std::string format = chunks.format();
    if (format.size() != 1) throw nb::type_error("not a column of integers");
    Paged<Result> result;
    Paged<uint8_t> validity;
    while (chunks.next()) {
        nb::gil_scoped_release release;
        switch (format[0]) {
            case 'c': append_filled<int8_t>(chunks, null, validity, result); break;
            case 'C': append_filled<uint8_t>(chunks, null, validity, result); break;
            case 's': append_filled<int16_t>(chunks, null, validity, result); break;
            case 'S': append_filled<uint16_t>(chunks, null, validity, result); break;
            case 'i': append_filled<int32_t>(chunks, null, validity, result); break;
            case 'I': append_filled<uint32_t>(chunks, null, validity, result); break;
            case 'l': append_filled<int64_t>(chunks, null, validity, result); break;
            case 'L': append_filled<uint64_t>(chunks, null, validity, result); break;
            default: throw nb::type_error("not a column of integers");
        }
    }
    return to_numpy(std::move(result));
}

// Which rows of a column are not null.
nb::ndarray<nb::numpy, bool, nb::ndim<1>> present(const nb::object& column) {
    Chunks chunks(column);
    static_assert(sizeof(bool) == sizeof(uint8_t));
    Paged<uint8_t> result;  // a vector of bool would hold bits
    while (chunks.next()) {
        nb::gil_scoped_release release;
        const size_t before = result.size();
        result.resize(before + chunks.rows());
        chunks.write_validity(result.data() + before);
    }
    auto* owner = new Paged<uint8_t>(std::move(result));
    nb::capsule free_it(owner, [](void* p) noexcept { delete static_cast<Paged<uint8_t>*>(p); });
    return nb::ndarray<nb::numpy, bool, nb::ndim<1>>(owner->data(), {owner->size()}, free_it);
}

// Values and, if there are nulls, the bitmap of the others, until the Arrow library releases them.
struct Kept {
    std::vector<uint8_t> values, valid;
    const void* buffers[2] = {nullptr, nullptr};
};

void describe(Outgoing& column, const char* format, size_t rows, size_t nulls, const void** buffers) {
    column.schema.format = format;
    column.schema.name = "";
    column.schema.flags = ARROW_FLAG_NULLABLE;
    column.schema.release = [](ArrowSchema* schema) { schema->release = nullptr; };
    column.array.length = static_cast<int64_t>(rows);
    column.array.null_count = static_cast<int64_t>(nulls);
    column.array.n_buffers = 2;
    column.array.buffers = buffers;
}

std::unique_ptr<Outgoing> to_column(const char* format, size_t rows, size_t nulls, std::unique_ptr<Kept> kept) {
    kept->buffers[0] = nulls == 0 ? nullptr : kept->valid.data();
    kept->buffers[1] = kept->values.data();
    auto column = std::make_unique<Outgoing>();
    describe(*column, format, rows, nulls, kept->buffers);
    column->array.release = [](ArrowArray* array) {
        delete static_cast<Kept*>(array->private_data);
        array->release = nullptr;
    };
    column->array.private_data = kept.release();
    return column;
}

// Row numbers as a column with null for negative ones.
template <typename Row>
std::unique_ptr<Outgoing> row_indexes(In<Row> rows) {
    auto kept = std::make_unique<Kept>();
    const size_t count = rows.size();
    const Row* const from = rows.data();
    kept->values.resize(count * sizeof(uint32_t));
    kept->valid.resize((count + 7) / 8);
    size_t nulls = 0;
    for (size_t byte = 0; byte < kept->valid.size(); ++byte) {
        unsigned bits = 0;
        for (size_t bit = 0; bit < std::min<size_t>(8, count - 8 * byte); ++bit) {
            const Row row = from[8 * byte + bit];
            const bool present = row >= 0;
            const auto index = present ? static_cast<uint32_t>(row) : uint32_t{0};
            std::memcpy(kept->values.data() + (8 * byte + bit) * sizeof index, &index, sizeof index);
            bits |= unsigned{present} << bit;
            nulls += !present;
        }
        kept->valid[byte] = static_cast<uint8_t>(bits);
    }
    return to_column("I", count, nulls, std::move(kept));
}

template <typename T>
using Contiguous = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Releases, with the interpreter's lock, what an Arrow library has read.
template <typename Shared>
void release_shared(ArrowArray* array) {
    if (Py_IsInitialized()) {  // else the process ends
        const nb::gil_scoped_acquire acquire;
        delete static_cast<Shared*>(array->private_data);
    }
    array->release = nullptr;
}

// An array that an Arrow library reads, until that library releases it.
template <typename T>
struct SharedArray {
    Contiguous<T> array;
    const void* buffers[2];
};

template <typename T>
std::unique_ptr<Outgoing> share_column(const char* format, const Contiguous<T>& values) {
    auto* shared = new SharedArray<T>{values, {nullptr, values.data()}};
    auto column = std::make_unique<Outgoing>();
    describe(*column, format, values.size(), 0, shared->buffers);
    column->array.release = &release_shared<SharedArray<T>>;
    column->array.private_data = shared;
    return column;
}

struct SharedTexts {
    Contiguous<int64_t> offsets;
    Contiguous<uint8_t> bytes;
    const void* buffers[3];
};

// Texts as a column: text i is bytes[offsets[i]:offsets[i + 1]], in UTF-8.
std::unique_ptr<Outgoing> share_texts(const Contiguous<int64_t>& offsets, const Contiguous<uint8_t>& bytes) {
    const size_t count = offsets.size();
    if (count == 0 || offsets.data()[0] != 0 || !std::is_sorted(offsets.data(), offsets.data() + count) ||
        static_cast<size_t>(offsets.data()[count - 1]) > bytes.size()) {
        throw nb::value_error("offsets that are not those of texts");
    }
    auto* shared = new SharedTexts{offsets, bytes, {nullptr, offsets.data(), bytes.data()}};
    auto column = std::make_unique<Outgoing>();
    describe(*column, "U", count - 1, 0, shared->buffers);
    column->array.n_buffers = 3;
    column->array.release = &release_shared<SharedTexts>;
    column->array.private_data = shared;
    return column;
}

std::unique_ptr<Outgoing> pack_mask(const Contiguous<bool>& mask) {
    auto kept = std::make_unique<Kept>();
    const size_t count = mask.size();
    const bool* const from = mask.data();
    kept->values.resize((count + 7) / 8);
    size_t row = 0;
    for (; row + 8 <= count; row += 8) {
        uint64_t eight;  // bytes of 0 or 1, whose bits the product moves to its highest byte
        std::memcpy(&eight, from + row, sizeof eight);
        kept->values[row / 8] = static_cast<uint8_t>((eight * 0x0102040810204080) >> 56);
    }
    for (; row < count; ++row) kept->values[row / 8] |= static_cast<uint8_t>(unsigned{from[row]} << (row % 8));
    return to_column("b", count, 0, std::move(kept));
}

template <typename T>
void bind_column(nb::module_& module, const char* format) {
    module.def("column", [format](const Contiguous<T>& values) { return share_column<T>(format, values); },
               nb::arg("values").noconvert());
}

}  // namespace

void bind_arrow_columns(nb::module_& module) {
    module.def("filled", &filled<int64_t>, nb::arg("column"), nb::arg("null"),
               "A column of integers with a number for null.");
    module.def("filled_int32", &filled<int32_t>, nb::arg("column"), nb::arg("null"),
               "A column of integers as int32 (the lower 32 bits of larger ones), with a number for null.");
    module.def("present", &present, nb::arg("column"), "Which rows of a column are not null.");
    module.def("row_indexes", &row_indexes<int64_t>, nb::arg("rows"), "Row numbers as a column, null for negative ones.");
    module.def("row_indexes", &row_indexes<int32_t>, nb::arg("rows"));
    module.def("column", &pack_mask, nb::arg("values").noconvert(),
               "A contiguous array as a column. Polars' own conversion imports numpy.ma, which takes 10 ms.");
    module.def("text_column", &share_texts, nb::arg("offsets").noconvert(), nb::arg("bytes").noconvert(),
               "Texts, given by their offsets and their bytes in UTF-8, as a column.");
    bind_column<int8_t>(module, "c");
    bind_column<uint8_t>(module, "C");
    bind_column<int16_t>(module, "s");
    bind_column<uint16_t>(module, "S");
    bind_column<int32_t>(module, "i");
    bind_column<uint32_t>(module, "I");
    bind_column<int64_t>(module, "l");
    bind_column<uint64_t>(module, "L");
    bind_column<double>(module, "g");
}
