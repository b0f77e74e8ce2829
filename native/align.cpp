// The operators of one thread found in another recording of it: a shortest edit path from near a given diagonal.
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "bindings.hpp"

namespace nb = nanobind;

namespace {

using Codes = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

struct Match {
    int64_t i, j;
};

// Furthest-reaching paths (Myers 1986, with substitutions). furthest_[d] holds, for each diagonal k = j - i, the
// greatest i that d edits reach, or NONE. A path leaves out the start of b for nothing, up to slack from the centre
// diagonal, and ends where a does.
class Paths {
  public:
    Paths(const int32_t* a, int64_t n, const int32_t* b, int64_t m) : a_(a), b_(b), n_(n), m_(m) {}

    // False when more than max_edits are needed.
    bool find(int64_t centre, int64_t slack, int64_t max_edits) {
        centre_ = centre;
        slack_ = slack;
        for (int64_t d = 0; d <= max_edits; ++d) {
            std::vector<int64_t> row(static_cast<size_t>(2 * (slack + d) + 1), NONE);
            int64_t reached = NONE;
            for (int64_t k = centre - slack - d; k <= centre + slack + d; ++k) {
                int64_t i = d > 0 ? step(d, k) : k >= 0 ? 0 : NONE;
                if (i == NONE || i > n_ || i + k > m_ || i + k < 0) continue;
                while (i < n_ && i + k < m_ && a_[i] == b_[i + k]) ++i;
                row[k - centre + slack + d] = i;
                if (i == n_ && (reached == NONE || std::abs(k - centre) < std::abs(reached - centre))) reached = k;
            }
            furthest_.push_back(std::move(row));
            if (reached != NONE) {
                end_ = reached;
                return true;
            }
        }
        return false;
    }

    // The equal pairs on the path, in order.
    std::vector<Match> matches() const {
        std::vector<Match> found;
        int64_t k = end_;
        for (int64_t d = static_cast<int64_t>(furthest_.size()) - 1; d >= 0; --d) {
            const int64_t i = at(d, k);
            const int64_t from = d == 0 ? 0 : step(d, k);
            for (int64_t x = i; x > from; --x) found.push_back({x - 1, x - 1 + k});
            if (d == 0) break;
            if (at(d - 1, k) != NONE && at(d - 1, k) + 1 == from) continue;  // substituted
            k = at(d - 1, k - 1) == from ? k - 1 : k + 1;                    // inserted or deleted
        }
        std::reverse(found.begin(), found.end());
        return found;
    }

  private:
    static constexpr int64_t NONE = INT64_MIN / 2;

    int64_t at(int64_t d, int64_t k) const {
        const int64_t index = k - centre_ + slack_ + d;
        const std::vector<int64_t>& row = furthest_[d];
        return index < 0 || index >= static_cast<int64_t>(row.size()) ? NONE : row[index];
    }

    // Where the d-th edit lands on diagonal k.
    int64_t step(int64_t d, int64_t k) const {
        const int64_t substituted = at(d - 1, k), inserted = at(d - 1, k - 1), deleted = at(d - 1, k + 1);
        int64_t i = NONE;
        if (substituted != NONE && substituted < n_ && substituted + k < m_) i = substituted + 1;
        if (inserted != NONE && inserted + k <= m_) i = std::max(i, inserted);
        if (deleted != NONE && deleted < n_) i = std::max(i, deleted + 1);
        return i;
    }

    const int32_t *a_, *b_;
    int64_t n_, m_, centre_ = 0, slack_ = 0, end_ = 0;
    std::vector<std::vector<int64_t>> furthest_;
};

// Chunk by chunk, so that time stays linear: what lies near the end of a chunk is decided by the next one.
nb::tuple edit_path(Codes a, Codes b, int64_t start, int64_t slack, double most_edits) {
    constexpr int64_t CHUNK = 4096;
    const int64_t n = static_cast<int64_t>(a.shape(0)), m = static_cast<int64_t>(b.shape(0));
    std::vector<Match> all;
    {
        nb::gil_scoped_release release;
        int64_t i = 0, j = std::max<int64_t>(0, start);
        // The first chunk may start `slack` to either side, so b is entered that much earlier.
        int64_t band = std::min({slack, n, m});
        while (i < n && j < m) {
            const int64_t early = std::min(j, band);
            const int64_t take = std::min(CHUNK, n - i);
            const int64_t most = static_cast<int64_t>(most_edits * static_cast<double>(take)) + 8;
            const int64_t width = std::min(m - (j - early), take + early + band + most);
            Paths paths(a.data() + i, take, b.data() + (j - early), width);
            if (!paths.find(early, band, most)) break;
            const bool last = i + take == n;
            const size_t before = all.size();
            for (const Match& match : paths.matches()) {
                if (!last && match.i >= CHUNK * 7 / 8) break;
                all.push_back({i + match.i, j - early + match.j});
            }
            if (last || all.size() == before) break;
            i = all.back().i + 1;
            j = all.back().j + 1;
            band = 0;
        }
    }
    auto* rows = new std::vector<int64_t>();
    rows->reserve(2 * all.size());
    for (const Match& match : all) rows->push_back(match.i);
    for (const Match& match : all) rows->push_back(match.j);
    nb::capsule free_it(rows, [](void* p) noexcept { delete static_cast<std::vector<int64_t>*>(p); });
    const size_t count = all.size();
    using Rows = nb::ndarray<nb::numpy, int64_t, nb::ndim<1>>;
    return nb::make_tuple(Rows(rows->data(), {count}, free_it), Rows(rows->data() + count, {count}, free_it));
}

}  // namespace

void bind_align(nb::module_& module) {
    module.def("edit_path", &edit_path, nb::arg("a"), nb::arg("b"), nb::arg("start"), nb::arg("slack"),
               nb::arg("most_edits"),
               "Indices into a and into b of the equal pairs on a shortest edit path that brings a[0] to within slack of "
               "b[start]. Gives up, with the pairs so far, where a stretch needs more edits than this share of it.");
}
