// See observer.hpp.
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <locale>
#include <sstream>
#include <string_view>
#include <unordered_map>

#include "observer.hpp"

namespace etloom::observer {

namespace {

constexpr size_t kTensorWords = 3;  // address, storage, version; and the offset, where there is one

// The shortest decimal that is this number, as d.ddde+dd.
std::string shortest(double value) {
    char text[40];
#ifdef __cpp_lib_to_chars
    return {text, std::to_chars(text, text + sizeof text, value, std::chars_format::scientific).ptr};
#else  // the C++ library of macOS
    for (int places = 0;; ++places) {
        std::snprintf(text, sizeof text, "%.*e", places, value);
        for (char& c : text) c = c == ',' ? '.' : c;
        std::istringstream stream{std::string(text)};
        stream.imbue(std::locale::classic());
        double again = 0;
        stream >> again;
        if (again == value || places == 16) return text;
    }
#endif
}

// As Python writes a number, with `whole` behind one without a fraction.
std::string python_text(double value, const char* whole) {
    if (std::isnan(value)) return "nan";
    if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
    const std::string text = shortest(value);
    const size_t mark = text.find('e'), sign = text[0] == '-' ? 1 : 0;
    const int exponent = std::stoi(text.substr(mark + 1));
    std::string digits = text.substr(sign, 1) + (mark > sign + 2 ? text.substr(sign + 2, mark - sign - 2) : "");
    if (exponent < -4 || exponent >= 16) return text;
    if (exponent < 0) {
        digits.insert(0, "0." + std::string(static_cast<size_t>(-exponent - 1), '0'));
    } else if (digits.size() > static_cast<size_t>(exponent) + 1) {
        digits.insert(static_cast<size_t>(exponent) + 1, ".");
    } else {
        digits.append(static_cast<size_t>(exponent) + 1 - digits.size(), '0').append(whole);
    }
    return (sign != 0 ? "-" : "") + digits;
}

double to_double(uint64_t word) {
    double value;
    std::memcpy(&value, &word, sizeof value);
    return value;
}

// JSON has no number for what is not finite: a string then.
std::string double_text(double value) {
    const std::string text = python_text(value, ".0");
    return std::isfinite(value) ? text : '"' + text + '"';
}

// As Python writes complex(real, imag).
std::string complex_text(double real, double imag) {
    std::string text = python_text(imag, "");
    if (real == 0 && !std::signbit(real)) return '"' + text + "j\"";
    if (text[0] != '-') text.insert(0, "+");
    return "\"(" + python_text(real, "") + text + "j)\"";
}

// The numbers among the values of a form, by which its texts differ.
std::vector<uint32_t> number_words(const Form& form) {
    std::vector<uint32_t> words;
    for (const auto& [text, tag, word] : form.pieces) {
        if (tag != 0) words.push_back(word);
        if (tag == 'c') words.push_back(word + 1);
    }
    return words;
}

class Decoder {
  public:
    Decoder(const Words& words, const std::vector<Form>& forms) : words_(words), forms_(forms) {
        out_.texts.emplace_back("[]");
        int32_t tensors = 0;
        for (size_t i = 0; i < forms.size(); ++i) {
            by_key_.emplace(forms[i].key, static_cast<int32_t>(i));
            numbers_.push_back(number_words(forms[i]));
            first_tensor_.push_back(tensors);
            tensors += static_cast<int32_t>(forms[i].tensors.size());
        }
        tensors_ = tensors;
        fixed_.assign(forms.size(), -1);
    }
    void add(size_t row, size_t side, uint64_t key, uint64_t first, int64_t size);
    Arguments out() { return std::move(out_); }

  private:
    struct Known {
        int32_t form, text, next;  // next: of the same hash, or -1
        uint64_t first;
    };

    int32_t form_of(uint64_t key);
    int32_t text_of(int32_t form, uint64_t first);
    int32_t add_text(const Form& form, uint64_t first);
    void add_tensors(size_t row, size_t side, int32_t number, uint64_t first);

    const Words& words_;
    const std::vector<Form>& forms_;
    Arguments out_;
    std::unordered_map<uint64_t, int32_t> by_key_;
    std::vector<std::vector<uint32_t>> numbers_;
    std::vector<int32_t> first_tensor_, fixed_;  // fixed: the text of a form without numbers
    int32_t tensors_ = 0;
    std::unordered_map<uint64_t, int32_t> by_hash_;  // the last one of the hash in known_
    std::vector<Known> known_;
    uint64_t last_key_ = 0;
    int32_t last_form_ = -1;
};

int32_t Decoder::form_of(uint64_t key) {
    if (key != last_key_) {
        const auto at = by_key_.find(key);
        last_key_ = key;
        last_form_ = at == by_key_.end() ? -1 : at->second;
    }
    return last_form_;
}

void Decoder::add(size_t row, size_t side, uint64_t key, uint64_t first, int64_t size) {
    auto& [forms, texts] = out_.sides[side];
    int32_t form = key == 0 ? -1 : form_of(key);
    if (form >= 0 && size != static_cast<int64_t>(forms_[static_cast<size_t>(form)].words)) form = -1;
    out_.damaged += key != 0 && form < 0;
    forms.push_back(form);
    texts.push_back(form < 0 ? 0 : text_of(form, first));
    if (form >= 0) add_tensors(row, side, form, first);
}

int32_t Decoder::text_of(int32_t number, uint64_t first) {
    const auto which = static_cast<size_t>(number);
    const auto& numbers = numbers_[which];
    if (numbers.empty()) {
        if (fixed_[which] < 0) fixed_[which] = add_text(forms_[which], first);
        return fixed_[which];
    }
    uint64_t hash = which + 1;
    for (const uint32_t word : numbers) {
        hash = (hash ^ words_[first + word]) * 0x9E3779B97F4A7C15ULL;
        hash ^= hash >> 29;
    }
    int32_t& head = by_hash_.try_emplace(hash, -1).first->second;
    const auto is_same = [&](const Known& known) {
        for (const uint32_t word : numbers) {
            if (words_[known.first + word] != words_[first + word]) return false;
        }
        return known.form == number;
    };
    constexpr int kMost = 64;  // of one hash are compared: a file with more of them repeats texts
    int compared = 0;
    for (int32_t at = head; at >= 0 && compared < kMost; at = known_[static_cast<size_t>(at)].next, ++compared) {
        const Known& known = known_[static_cast<size_t>(at)];
        if (known.form == number && is_same(known)) return known.text;
    }
    known_.push_back({number, add_text(forms_[which], first), head, first});
    head = static_cast<int32_t>(known_.size() - 1);
    return known_.back().text;
}

int32_t Decoder::add_text(const Form& form, uint64_t first) {
    std::string text;
    for (const auto& [constant, tag, word] : form.pieces) {
        const uint64_t* const at = words_.data + first + word;
        switch (tag) {
            case 0: text += constant; break;
            case 'i': text += std::to_string(static_cast<int64_t>(*at)); break;
            case 'd': text += double_text(to_double(*at)); break;
            default: text += complex_text(to_double(at[0]), to_double(at[1]));
        }
    }
    out_.texts.push_back(std::move(text));
    return static_cast<int32_t>(out_.texts.size() - 1);
}

void Decoder::add_tensors(size_t row, size_t side, int32_t number, uint64_t first) {
    const auto which = static_cast<size_t>(number);
    int32_t tensor = first_tensor_[which] + (side == 0 ? 0 : tensors_);
    for (const auto& [word, has_offset] : forms_[which].tensors) {
        const uint64_t* const at = word < 0 ? nullptr : words_.data + first + word;
        out_.operators.push_back(static_cast<int64_t>(row));
        out_.tensor.push_back(tensor++);
        out_.address.push_back(at == nullptr ? 0 : at[0]);
        out_.storage.push_back(at == nullptr ? 0 : at[1]);
        out_.version.push_back(at == nullptr ? 0 : static_cast<int64_t>(at[2]));
        out_.offset.push_back(at != nullptr && has_offset ? static_cast<int64_t>(at[kTensorWords]) : 0);
    }
}

}  // namespace

bool is_sound(const Form& form) {
    for (const auto& [text, tag, word] : form.pieces) {
        const uint32_t needed = tag == 'c' ? 2 : tag == 0 ? 0 : 1;
        if (tag != 0 && tag != 'i' && tag != 'd' && tag != 'c') return false;
        if (word > form.words || needed > form.words - word) return false;
    }
    for (const auto& [word, has_offset] : form.tensors) {
        if (word >= 0 && static_cast<size_t>(word) + kTensorWords + (has_offset ? 1 : 0) > form.words) return false;
    }
    return true;
}

Arguments decode_arguments(const Words& words, const std::array<const uint64_t*, 2>& keys,
                           const std::array<const uint64_t*, 2>& firsts, const std::array<const int64_t*, 2>& sizes,
                           size_t operators, const std::vector<Form>& forms) {
    Decoder decoder(words, forms);
    for (size_t row = 0; row < operators; ++row) {
        for (size_t side = 0; side < 2; ++side) decoder.add(row, side, keys[side][row], firsts[side][row], sizes[side][row]);
    }
    return decoder.out();
}

}  // namespace etloom::observer
