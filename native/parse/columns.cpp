// Columns to Arrow, and what is wrong with the texts of a column.
#include "columns.hpp"

#include "arrow_c.hpp"

namespace etloom {

namespace {

// What an exported array keeps alive until its consumer releases it.
struct Kept {
    std::shared_ptr<void> values;
    std::vector<uint8_t> valid;
    const void* buffers[3] = {nullptr, nullptr, nullptr};
    std::vector<int64_t> offsets;
    std::string bytes;
    std::unique_ptr<ArrowArray> dictionary;
};

void release_array(ArrowArray* array) {
    if (array->dictionary != nullptr && array->dictionary->release != nullptr) {
        array->dictionary->release(array->dictionary);
    }
    delete static_cast<Kept*>(array->private_data);
    array->release = nullptr;
}

void release_schema(ArrowSchema* schema) {
    if (schema->dictionary != nullptr) {
        if (schema->dictionary->release != nullptr) schema->dictionary->release(schema->dictionary);
        delete schema->dictionary;
    }
    schema->release = nullptr;
}

void fill_schema(ArrowSchema* schema, const char* format) {
    *schema = ArrowSchema{};
    schema->format = format;
    schema->name = "";
    schema->flags = ARROW_FLAG_NULLABLE;
    schema->release = release_schema;
}

void fill_array(ArrowArray* array, size_t rows, int64_t nulls, int64_t buffers, Kept* kept) {
    *array = ArrowArray{};
    array->length = static_cast<int64_t>(rows);
    array->null_count = nulls;
    array->n_buffers = buffers;
    array->buffers = kept->buffers;
    array->private_data = kept;
    array->release = release_array;
}

}  // namespace

void Column::leave_with(ArrowSchema* schema, ArrowArray* array, const char* format, size_t rows,
                        std::shared_ptr<void> values, const void* data, Dictionary* texts) {
    auto* kept = new Kept;
    if (nulls_ != 0) mark_values(rows);
    kept->values = std::move(values);
    kept->valid = std::move(valid_);
    kept->buffers[0] = nulls_ == 0 ? nullptr : kept->valid.data();
    kept->buffers[1] = data;
    fill_schema(schema, format);
    fill_array(array, rows, nulls_, 2, kept);
    valid_ = {};
    marked_ = 0;
    nulls_ = 0;
    if (texts == nullptr) return;

    auto* words = new Kept;
    words->offsets.push_back(0);
    for (const auto& text : texts->texts()) {
        words->bytes.append(text);
        words->offsets.push_back(static_cast<int64_t>(words->bytes.size()));
    }
    words->buffers[1] = words->offsets.data();
    words->buffers[2] = words->bytes.data();
    kept->dictionary = std::make_unique<ArrowArray>();
    fill_array(kept->dictionary.get(), texts->texts().size(), 0, 3, words);
    array->dictionary = kept->dictionary.get();
    schema->dictionary = new ArrowSchema;
    fill_schema(schema->dictionary, "U");
}

void Texts::append(const Column& other, const Shifts&) {
    constexpr uint32_t kUnknown = UINT32_MAX;
    const auto& texts = static_cast<const Texts&>(other);
    const auto& known = texts.dictionary_.texts();
    codes_of_other_.resize(known.size(), kUnknown);
    const size_t before = values_.size(), rows = texts.values_.size();
    values_.resize(before + rows);
    for (size_t i = 0; i < rows; ++i) {
        if (!texts.is_valid(i)) continue;
        uint32_t& code = codes_of_other_[texts.values_[i]];
        if (code == kUnknown) code = dictionary_.code(known[texts.values_[i]]);
        values_[before + i] = code;
    }
    append_bitmap(before, other);
}

void Texts::settle(Troubles& troubles) {
    constexpr const char* kNames[] = {"", "long_text", "nonfinite", "invalid_escape", "invalid_json"};
    const auto& texts = dictionary_.texts();
    while (faults_.size() < texts.size()) {
        const std::string_view text = texts[faults_.size()];
        faults_.push_back(finish_ == Finish::kUnescape ? fault_of_text(text) : fault_of_json(text));
        faultless_ = faultless_ && faults_.back() == Fault::kNone;
    }
    if (faultless_) return;
    for (size_t row = 0; row < values_.size(); ++row) {
        if (!is_valid(row)) continue;
        const Fault fault = faults_[values_[row]];
        if (fault == Fault::kNone) continue;
        troubles[kNames[static_cast<size_t>(fault)]].add(texts[values_[row]]);
        if (fault == Fault::kNoJson) unmark(row);
    }
}

void Texts::leave(ArrowSchema* schema, ArrowArray* array) {
    if (finish_ == Finish::kPlain) return leave_as(schema, array, "I", &dictionary_);
    Dictionary finished;
    std::vector<uint32_t> codes;
    codes.reserve(dictionary_.texts().size());
    bool is_same = !dictionary_.texts().empty();
    for (const auto& text : dictionary_.texts()) {
        codes.push_back(finished.code(finish_ == Finish::kUnescape ? unescape(text) : canonical(text)));
        is_same = is_same && codes.back() + 1 == codes.size();
    }
    if (!is_same) {
        for (auto& code : values_) code = codes.empty() ? 0 : codes[code];
    }
    leave_as(schema, array, "I", &finished);
}

}  // namespace etloom
