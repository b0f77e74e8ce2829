// What went wrong, counted by kind, each with its first example.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <string_view>

namespace etloom {

struct Trouble {
    uint64_t count = 0;
    std::string example;
    void add(std::string_view what, uint64_t times = 1) {
        if (count == 0) example = what.substr(0, 200);
        count += times;
    }
};

using Troubles = std::map<std::string, Trouble, std::less<>>;

}  // namespace etloom
