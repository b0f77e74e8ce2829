// Feeds random and damaged observer files to their native decoder.
//
//   fuzz_observer SECONDS [MAX_INPUTS]
//
// Built with AddressSanitizer and UndefinedBehaviorSanitizer (`make fuzz`): a report of theirs ends the run, as does an
// input that takes more than 10 seconds, and an answer that refers to what is not there. The seed of the input is printed.
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "observer.hpp"

namespace {

using namespace etloom::observer;
using Random = std::mt19937_64;

constexpr size_t kChunkWords = 128, kHead = 8;
uint64_t seed = 0;  // of the input at hand, for the report

extern "C" void __sanitizer_set_death_callback(void (*callback)());

void report() { std::fprintf(stderr, "the input of seed %llu\n", static_cast<unsigned long long>(seed)); }

void fail(const char* what) {
    std::fprintf(stderr, "%s\n", what);
    report();
    _exit(5);
}

size_t below(Random& random, size_t limit) { return limit == 0 ? 0 : random() % limit; }

uint64_t odd_word(Random& random) {
    const double doubles[] = {0.1, -0.0, 1e16, 1e-5, 5e-324, -1.7e308, __builtin_nan(""), __builtin_inf()};
    uint64_t word;
    std::memcpy(&word, &doubles[below(random, std::size(doubles))], sizeof word);
    const uint64_t words[] = {below(random, 12), random(), word, UINT64_MAX, uint64_t{1} << 63, uint64_t{1} << 32};
    return words[below(random, std::size(words))];
}

// One record of a random type; its length is mostly true.
void add_record(std::vector<uint64_t>& words, Random& random) {
    const size_t heads[] = {6, 3, 2, 3, 2};
    const size_t type = 1 + below(random, 5), size = heads[type - 1] + below(random, 6);
    const uint64_t id = below(random, 8), flags = below(random, 5), said = below(random, 50) == 0 ? below(random, 70000) : size;
    words.push_back(type | flags << 8 | (said & 0xFFFF) << 16 | id << 32);
    for (size_t i = 1; i < size; ++i) words.push_back(odd_word(random));
    if (type == 3) words[words.size() - size + 1] = below(random, (size - 2) * 8 + 2) | (below(random, 4) == 0 ? uint64_t{1} << 32 : 0);
}

std::vector<uint64_t> random_file(Random& random) {
    std::vector<uint64_t> file;
    for (size_t chunks = 1 + below(random, 5); chunks > 0; --chunks) {
        std::vector<uint64_t> records;
        while (below(random, 30) != 0 && records.size() < kChunkWords - kHead - 12) add_record(records, random);
        const uint64_t closed = below(random, 8) == 0;
        uint64_t sum = 0, weighted = 0;
        for (size_t i = 0; i < records.size(); ++i) {
            sum += records[i];
            weighted += records[i] * (i + 1);
        }
        const uint64_t used = below(random, 40) == 0 ? below(random, 2000) : records.size() * 8;
        const uint64_t head[kHead] = {0x4B4E4843 | (1 + below(random, 2)) << 32 | closed << 40, below(random, 9), below(random, 3) | used << 32,
                                      random(), random(), sum, weighted, 0};
        file.insert(file.end(), head, head + kHead);
        file.insert(file.end(), records.begin(), records.end());
        file.resize((file.size() + kChunkWords - 1) / kChunkWords * kChunkWords);
    }
    for (size_t changes = below(random, 6); changes > 0; --changes) file[below(random, file.size())] ^= uint64_t{1} << below(random, 64);
    if (below(random, 8) == 0) file.resize(below(random, file.size() + 1));
    file.shrink_to_fit();  // so that a read behind it is seen
    return file;
}

// A form with as many words as one of the lists that have its key, and random numbers and tensors in them.
Form random_form(uint64_t key, const Operators& operators, Random& random) {
    Form form{key, static_cast<uint32_t>(below(random, 4)), {}, {}};
    for (const Lists& lists : operators.lists) {
        for (size_t row = 0; row < lists.key.size(); ++row) {
            if (lists.key[row] == key && below(random, 3) == 0) form.words = static_cast<uint32_t>(lists.words[row]);
        }
    }
    for (size_t pieces = below(random, 5); pieces > 0; --pieces) {
        const char tags[] = {0, 'i', 'd', 'c', 'x'};
        form.pieces.push_back({"[\"\"]", tags[below(random, 40) == 0 ? 4 : below(random, 4)], static_cast<uint32_t>(below(random, form.words + 1))});
    }
    for (size_t tensors = below(random, 3); tensors > 0; --tensors) {
        form.tensors.push_back({static_cast<int32_t>(below(random, form.words + 2)) - 1, below(random, 2) == 0});
    }
    return form;
}

void check_records(const Records& records, size_t words) {
    const Operators& operators = records.operators;
    const size_t rows = operators.handle.size();
    for (size_t row = 0; row < rows; ++row) {
        if (row > 0 && operators.handle[row] <= operators.handle[row - 1]) fail("the handles are not in order");
        if (operators.parent[row] >= static_cast<int64_t>(row)) fail("a parent behind its operator");
        for (const Lists& lists : operators.lists) {
            if (lists.first[row] + static_cast<uint64_t>(lists.words[row]) > words) fail("a list outside of the file");
        }
    }
}

void check_arguments(const Arguments& arguments, size_t rows) {
    for (const auto& side : arguments.sides) {
        if (side.form.size() != rows || side.text.size() != rows) fail("not a text per operator");
        for (const int32_t text : side.text) {
            if (static_cast<size_t>(text) >= arguments.texts.size()) fail("there is no such text");
        }
    }
    etloom::Buffer<uint8_t> created;
    created.resize(arguments.address.size());
    for (size_t i = 0; i < created.size(); i += 2) created[i] = 1;
    const Uses uses{arguments.address.data(), arguments.version.data(),   arguments.offset.data(),
                    created.data(),           arguments.operators.data(), created.size()};
    const auto incarnations = number_incarnations(uses);
    for (const int64_t number : incarnations.number) {
        if (number < 1 || static_cast<size_t>(number) > created.size()) fail("there is no such object");
    }
}

void decode(Random& random) {
    const auto file = random_file(random);
    const Words words{file.data(), file.size()};
    const Records records = read_records(words, kChunkWords, below(random, 8));
    check_records(records, file.size());
    std::vector<Form> forms;
    for (const uint64_t key : records.forms) {
        if (Form form = random_form(key, records.operators, random); is_sound(form)) forms.push_back(std::move(form));
    }
    const auto& [inputs, outputs] = records.operators.lists;
    const size_t rows = records.operators.handle.size();
    check_arguments(decode_arguments(words, {inputs.key.data(), outputs.key.data()}, {inputs.first.data(), outputs.first.data()},
                                     {inputs.words.data(), outputs.words.data()}, rows, forms),
                    rows);
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 2) return 2;
    const double seconds = std::atof(argv[1]);
    const uint64_t most = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : UINT64_MAX;
    __sanitizer_set_death_callback(report);
    signal(SIGALRM, [](int) { fail("an input took more than 10 seconds"); });
    const uint64_t start = std::random_device{}();
    const auto begun = std::chrono::steady_clock::now();
    const auto spent = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count(); };
    uint64_t inputs = 0;
    for (; inputs < most && spent() < seconds; ++inputs) {
        seed = start + inputs;
        Random random(seed);
        alarm(10);
        decode(random);
    }
    std::printf("%llu observer files in %.0f s (start %llu): no fault\n", static_cast<unsigned long long>(inputs), spent(),
                static_cast<unsigned long long>(start));
}
