// Mutates small trace documents and feeds them to the native parsers in pieces of random size.
//
//   fuzz SECONDS [MAX_INPUTS] SEED_FILE...
//
// Built with AddressSanitizer and UndefinedBehaviorSanitizer (`make fuzz`): a report of theirs ends the run, as does an
// input that takes more than 10 seconds, or with the limits that the Makefile sets more than 1 GB; and an event that is
// neither read nor counted, and one that two threads read otherwise than one, or a known layout otherwise than tokens.
// The input at fault is left in fuzz-input.bin.
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "arrow_c.hpp"
#include "parsers.hpp"
#include "perfetto.hpp"
#include "perfetto_writer.hpp"
#include "sqlite_table.hpp"

namespace {

std::string input;  // the one being read, for the report

void keep_input() {
    if (std::FILE* out = std::fopen("fuzz-input.bin", "wb")) {
        std::fwrite(input.data(), 1, input.size(), out);
        std::fclose(out);
    }
}

extern "C" void __sanitizer_set_death_callback(void (*callback)());

void too_long(int) {
    keep_input();
    constexpr char kMessage[] = "an input took more than 10 seconds: fuzz-input.bin\n";
    if (write(2, kMessage, sizeof kMessage - 1) < 0) _exit(4);
    _exit(3);
}

using Random = std::mt19937_64;
size_t below(Random& random, size_t limit) { return limit == 0 ? 0 : random() % limit; }

const char* const kTokens[] = {
    "{", "}", "[", "]", ",", ":", "\"", "\\", "\\\"", "\\u12", "\\ud800", "null", "NaN", "-1", "1e400", "[]", "{}",
    "\"ph\":", "\"name\":", "\"args\":", "\"id\":", "},{\"ph\":\"X\",", "},{\"id\":", "]}", "\xff", "\xc3", "\n",
    "\"traceEvents\":[", "\"nodes\":[", "18446744073709551616", "-9223372036854775808", "0.0000000001e30",
    "GenericList[Tensor(float)]", "Tuple[", "\"ts\":", "\"dur\":-1", "\"attrs\":[", "{\"name\":\"rf_id\",\"value\":",
    "\"inputs\":{\"values\":[[1,2,3,4,5,\"cpu\"]],\"types\":[\"Tensor(x)\"]}", "\"C\"", "\"M\"", "\"B\"", "\"s\"", " ",
    "\"[memory]\"", "\"ph\":\"i\",\"name\":\"[memory]\",", "\"values\":", "\"types\":", "[1 2]", "inf", "\\q",
    "\"attrs\":null", "{\"name\":\"x\",\"type\":\"y\",\"value\":1},", "\"args\":{", "\"id\":\"0x1\"", "12345678", "-",
};

// One to eight changes: bytes, tokens, parts taken out, doubled, moved in from another seed, and repetition.
std::string mutated(const std::vector<std::string>& seeds, Random& random) {
    std::string text = seeds[below(random, seeds.size())];
    for (size_t changes = 1 + below(random, 8); changes > 0; --changes) {
        const size_t at = below(random, text.size() + 1);
        const size_t length = below(random, std::min<size_t>(text.size() - at, 1 + below(random, 200)) + 1);
        const std::string token = kTokens[below(random, std::size(kTokens))];
        switch (below(random, 8)) {
            case 0: if (at < text.size()) text[at] = static_cast<char>(random()); break;
            case 1: if (at < text.size()) text[at] = static_cast<char>(text[at] ^ (1 << below(random, 8))); break;
            case 2: text.insert(at, token); break;
            case 3: text.replace(at, length, token); break;
            case 4: text.erase(at, length); break;
            case 5: text.insert(at, text.substr(at, length)); break;
            case 6: {
                const std::string& other = seeds[below(random, seeds.size())];
                const size_t from = below(random, other.size() + 1);
                text.insert(at, other.substr(from, below(random, 300)));
                break;
            }
            default: {
                // Depth and length: rarely, since each such input costs as much as hundreds of others.
                std::string many;
                for (size_t n = below(random, below(random, 64) == 0 ? 5000 : 20); n > 0; --n) many += token;
                text.insert(at, many);
            }
        }
    }
    if (below(random, 16) == 0) text.resize(below(random, text.size() + 1));
    return text;
}

const char* const kEvents[] = {
    R"({"ph":"X","cat":"kernel","name":"k","pid":0,"tid":7,"ts":1.250,"dur":2.000,"args":{"stream":7,"grid":[1,1,1],"zz":1}})",
    R"({"ph": "X", "name": "n", "ts": 5, "args": {"a": 5, "b": [1, "x"], "c": "t"}, "other": 1})",
    R"({"ph":"M","name":"x","pid":1,"args":{"name":"y"}})",
    R"({"ph":"C","name":"x","pid":1,"ts":1.000,"args":{"a":1,"b":2}})",
    R"({"ph":"s","id":9,"pid":1,"tid":1,"ts":1.000,"cat":"ac2g","name":"ac2g","bp":"e"})",
    R"({"args":{},"ph":"X","ts":1.000,"args":{"zz":1},"other":2})",
    R"({"ph":"i","name":"[memory]","pid":1,"tid":2,"ts":1.000,"s":"t","args":{"Addr":5,"Bytes":-5}})",
    R"({"ph":"X","ts":1,"args":{"Input Dims":[[1],["]"]],"Ev Idx":5,"Python id":1}})",
};
const char* const kParts[] = {
    "{", "}", "[", "]", ",", ":", "\"", "\\", "\\\"", "5", "-", "1.", "1e5", "nan", "tru", "[]", "{}", "[\"]\"]", "\xc3\xa9",
    "\xff", "\n", " ", "\f", "\"a\"", "\"ph\":", "\"M\"", "\"ph\":\"C\",", "\"ph\":\"M\",", "\"args\":{},", "\"args\":null,",
    "\"args\":{\"k\":1},", "\"stream\":-1", "\"device\":3000000000,", "\"zz\":1", "\"b\" 1", "\"tid\":\"lane\",", "12345678",
    "123456789012345.12", "1234567890123.123", "}},{", ":5",
};

// One to three changes near the marks of an event.
std::string changed(std::string event, Random& random) {
    for (size_t changes = 1 + below(random, 3); changes > 0; --changes) {
        size_t at = below(random, event.size() + 1);
        if (below(random, 2) == 0) at = std::min(event.find_first_of("{}[],:\"", at), event.size());
        const size_t length = below(random, std::min<size_t>(event.size() - at, 12) + 1);
        const std::string part = kParts[below(random, std::size(kParts))];
        switch (below(random, 4)) {
            case 0: event.insert(at, part); break;
            case 1: event.replace(at, length, part); break;
            case 2: event.erase(at, length); break;
            default: event.insert(at, event.substr(at, 2 * length));
        }
    }
    return event;
}

// A document of few events, some of them changed, that come again and again: so that their layouts are learned.
std::string repeated(Random& random) {
    std::vector<std::string> events;
    for (size_t i = 2 + below(random, 3); i > 0; --i) events.push_back(kEvents[below(random, std::size(kEvents))]);
    for (size_t i = 1 + below(random, 3); i > 0; --i) events.push_back(changed(events[below(random, events.size())], random));
    std::string all = "{\"traceEvents\":[";
    for (size_t i = 4 + below(random, 12); i > 0; --i) {
        all += events[below(random, events.size())];
        if (below(random, 8) == 0) all = changed(all, random);
        all += i == 1 ? "]}" : below(random, 6) == 0 ? ",\n " : ",";
    }
    return all;
}

// Whether each row of the table is one of the file.
bool accounts_for_rows(const std::string& table) {
    return table == "events" || table == "flows" || table == "memory" || table == "metadata" || table == "nodes";
}

size_t width_of(char format) { return format == 'c' ? 1 : format == 's' ? 2 : format == 'i' || format == 'I' ? 4 : 8; }

// Appends the values of a column as bytes, a text as its length and itself.
void append_values(std::string& out, const ArrowSchema& schema, const ArrowArray& array) {
    const auto* valid = static_cast<const uint8_t*>(array.buffers[0]);
    const auto* values = static_cast<const char*>(array.buffers[1]);
    const size_t width = width_of(*schema.format);
    for (size_t row = 0; row < static_cast<size_t>(array.length); ++row) {
        const bool there = valid == nullptr || ((valid[row >> 3] >> (row & 7)) & 1);
        out += there ? '1' : '0';
        if (!there) continue;
        if (array.dictionary == nullptr) {
            out.append(values + row * width, width);
            continue;
        }
        const uint32_t code = reinterpret_cast<const uint32_t*>(values)[row];
        if (code >= array.dictionary->length) std::abort();
        const auto* offsets = static_cast<const int64_t*>(array.dictionary->buffers[1]) + code;
        const auto length = static_cast<size_t>(offsets[1] - offsets[0]);
        out.append(std::to_string(length)).append(" ");
        out.append(static_cast<const char*>(array.dictionary->buffers[2]) + offsets[0], length);
    }
}

using Pieces = std::vector<std::vector<char>>;

// Everything that the parser made of the pieces.
std::string read(std::unique_ptr<etloom::Parser> parser, const Pieces& pieces, size_t split_from, bool only_by_tokens = false) {
    parser->split_from(split_from);
    if (only_by_tokens) parser->only_by_tokens();
    for (const auto& piece : pieces) parser->feed(piece.data(), piece.size());
    parser->finish();
    parser->sort();
    const uint64_t rows = parser->rows_seen();
    uint64_t accounted = parser->damaged().count;
    for (const char* name : {"no_phase", "no_time", "no_id", "empty_metadata", "no_counter", "counter_events"}) {
        const auto found = parser->troubles().find(name);
        if (found != parser->troubles().end()) accounted += found->second.count;
    }
    std::string all = std::to_string(rows) + " " + std::to_string(parser->damaged().count);
    for (const auto& [name, trouble] : parser->troubles()) all += name + std::to_string(trouble.count) + trouble.example;
    for (auto& [name, table] : parser->tables()) {
        size_t length = table.rows();
        all += name;
        for (auto& named : table.columns()) {
            if (named.column->size() != length) std::abort();
            ArrowSchema schema{};
            ArrowArray array{};
            named.column->leave(&schema, &array);
            if (array.length != static_cast<int64_t>(length) || array.null_count > array.length) std::abort();
            append_values(all, schema, array);
            schema.release(&schema);
            array.release(&array);
        }
        if (accounts_for_rows(name)) accounted += length;
    }
    if (accounted != rows) std::abort();
    return all;
}

// Two threads have to give what one gives, and a known layout what tokens give.
template <typename Make>
void read_by_one_and_two(Make make, Random& random) {
    const size_t largest = below(random, 3) == 0 ? input.size() + 1 : 1 + below(random, 200);
    Pieces pieces;
    for (size_t at = 0; at < input.size(); at += pieces.back().size()) {
        const size_t size = std::min(input.size() - at, 1 + below(random, largest));
        // A copy of its own, so that a read behind the piece is seen.
        pieces.emplace_back(input.begin() + static_cast<ptrdiff_t>(at), input.begin() + static_cast<ptrdiff_t>(at + size));
    }
    const std::string expected = read(make(), pieces, SIZE_MAX, true);
    if (read(make(), pieces, SIZE_MAX) != expected || read(make(), pieces, 1) != expected) std::abort();
    // A parser may be dropped while its second thread still appends rows.
    const auto dropped = make();
    dropped->split_from(1);
    dropped->feed(input.data(), input.size());
}

// A message of random fields, which are often those of a packet, an event, a track or an annotation, with messages in them.
std::string random_message(Random& random, int depth) {
    constexpr uint32_t kNumbers[] = {1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12, 13, 17, 22, 23, 29, 30, 31, 41, 44, 45, 46, 47, 48, 58, 59, 60};
    std::string message;
    const auto put = [&](uint64_t value) {
        for (; value >= 0x80; value >>= 7) message += static_cast<char>(value | 0x80);
        message += static_cast<char>(value);
    };
    for (size_t fields = 1 + below(random, 6); fields > 0; --fields) {
        const uint32_t number = below(random, 30) == 0 ? static_cast<uint32_t>(random() >> 36) : kNumbers[below(random, std::size(kNumbers))];
        const uint64_t type = depth == 0 ? 2 : below(random, 3);
        put(static_cast<uint64_t>(depth == 0 ? 1 : number) << 3 | type);
        if (type == 0) put(below(random, 4) == 0 ? random() : below(random, 6));
        if (type == 1) message.append(8, static_cast<char>(random()));
        if (type != 2) continue;
        const std::string content = depth < 5 && below(random, 5) != 0 ? random_message(random, depth + 1) : kTokens[below(random, std::size(kTokens))];
        put(content.size());
        message += content;
    }
    return message;
}

// Tables of a SQLite file, whose columns have a value of each row; a page is read once, so that few bytes are few rows.
void read_as_sqlite() {
    using etloom::sqlite::Type;
    const auto read_at = [](uint64_t at, char* into, size_t size) {
        if (at > input.size() || size > input.size() - at) return false;
        std::copy_n(input.begin() + static_cast<ptrdiff_t>(at), size, into);
        return true;
    };
    for (uint32_t root = 1; root < 5; ++root) {
        etloom::sqlite::TableReader reader(read_at, input.size(), {{"a", 0, Type::kWhole, true, false}, {"b", 1, Type::kText, false, false},
                                                                   {"c", 2, Type::kReal, false, false}, {"d", 3, Type::kNone, false, root == 2}});
        if (!reader.read(root, root == 3 ? 5 : SIZE_MAX / 2)) continue;
        if (reader.rows > input.size()) std::abort();
        for (auto& named : reader.tables["rows"].columns()) {
            if (named.column->size() != reader.rows) std::abort();
        }
    }
}

// A Perfetto trace may be read, and a Chrome trace written as one, whatever is in them.
void read_as_perfetto() {
    const std::vector<char> copy(input.begin(), input.end());  // of its own, so that a read behind it is seen
    const std::string_view bytes(copy.data(), copy.size());
    for (const auto& packet : etloom::perfetto::find_compressed(bytes)) {
        if (packet.from > packet.data || packet.data + packet.size > packet.to || packet.to > bytes.size()) std::abort();
    }
    etloom::perfetto::Trace trace(bytes, SIZE_MAX / 2);
    for (auto& [name, table] : trace.tables) {
        for (auto& named : table.columns()) {
            if (named.column->size() != table.rows()) std::abort();
        }
    }
    etloom::perfetto::Writer writer;
    std::string packets = writer.start(5) + writer.add(bytes.substr(std::min(bytes.find('{'), bytes.size())));
    etloom::perfetto::Trace written(packets, SIZE_MAX / 2);
    if (written.damaged != 0 || written.trailing != 0) std::abort();
}

}  // namespace

#ifdef ETLOOM_LIBFUZZER
// `make fuzz-coverage`: libFuzzer chooses the inputs by the code that they reach; it has limits of its own.
extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, size_t size) {
    input.assign(reinterpret_cast<const char*>(data), size);
    Random random(size);
    read_by_one_and_two(etloom::kineto_parser, random);
    read_by_one_and_two(etloom::execution_trace_parser, random);
    read_as_perfetto();
    read_as_sqlite();
    return 0;
}
#else
int main(int argc, char** argv) {
    if (argc < 4) return 2;
    const double seconds = std::atof(argv[1]);
    const uint64_t most = std::strtoull(argv[2], nullptr, 10);
    std::vector<std::string> seeds;
    for (int i = 3; i < argc; ++i) {
        std::ifstream file(argv[i], std::ios::binary);
        seeds.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    }
    __sanitizer_set_death_callback(keep_input);
    signal(SIGALRM, too_long);
    signal(SIGABRT, [](int) { keep_input(); _exit(5); });

    const auto read_both = [](Random& random) {
        alarm(10);
        read_by_one_and_two(etloom::kineto_parser, random);
        read_by_one_and_two(etloom::execution_trace_parser, random);
        read_as_perfetto();
    };
    const uint64_t start = std::random_device{}();
    Random random(start);
    for (const auto& seed : seeds) {
        input = seed;
        read_both(random);
    }
    const auto begun = std::chrono::steady_clock::now();
    const auto spent = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count(); };
    uint64_t inputs = 0;
    while (inputs < most && spent() < seconds) {
        const size_t kind = below(random, 3);
        input = kind == 0 ? repeated(random) : kind == 1 ? mutated(seeds, random) : random_message(random, 0);
        read_both(random);
        ++inputs;
    }
    std::printf("%llu inputs, each through all parsers, in %.0f s (start %llu): no fault\n",
                static_cast<unsigned long long>(inputs), spent(), static_cast<unsigned long long>(start));
}
#endif
