// Events of a Kineto / Chrome trace as rows. The names of tables and columns are those of src/etloom/core/schema.py.
#pragma once
#include <cstdint>
#include <string_view>
#include <vector>

#include "kineto_event.hpp"
#include "parser.hpp"

namespace etloom::kineto {

// Identifiers of processes, threads and arrows. One that the file states as a text gets a number below all real ones.
class Identifiers : public Numbers<int64_t> {
  public:
    explicit Identifiers(Dictionary& texts) : texts_(texts) {}
    void push_text(std::string_view text) {
        rows_of_texts_.push_back(static_cast<uint32_t>(size()));
        push(kFirst - static_cast<int64_t>(texts_.code(text)));
    }
    void truncate(size_t rows) override {
        while (!rows_of_texts_.empty() && rows_of_texts_.back() >= rows) rows_of_texts_.pop_back();
        Numbers::truncate(rows);
    }
    // Texts that are new here get numbers in the order in which the other parser met them, which is that of the file.
    void append(const Column& other, const Shifts& shifts) override;
    void forget_other() override { numbers_of_other_.clear(); }

  private:
    static constexpr int64_t kFirst = -(int64_t{1} << 40);

    Dictionary& texts_;
    std::vector<uint32_t> rows_of_texts_;  // not of those that were appended
    std::vector<int64_t> numbers_of_other_;  // by its code
};

class EventTables {
  public:
    EventTables(Tables& tables, Troubles& troubles);
    // The rows of one event, which may be changed on the way; or the trouble it is in.
    void add(Event& event, uint64_t position);
    // Texts that identify processes, threads or arrows: keeps their number, and removes those that were added since.
    void mark_identifiers() {
        marked_lanes_ = lanes_.texts().size();
        marked_flow_ids_ = flow_ids_.texts().size();
    }
    void truncate_identifiers() {
        lanes_.truncate(marked_lanes_);
        flow_ids_.truncate(marked_flow_ids_);
    }
    // Events by start, the longest first, then as in the file; and what hangs on them.
    void order(Worker* worker);

  private:
    enum class Role : uint8_t { kOther, kHost };

    void add_event(Event& event, int64_t ts, uint64_t position);
    void add_flow(Event& event, int64_t ts);
    void add_memory(Event& event, int64_t ts);
    void add_counter(const Event& event);
    void add_metadata(const Event& event);
    // What there is no column for in these tables is counted.
    void lost(Event& event);

    void side(Group group, Event& event, uint32_t row, bool wanted);
    void push_fields(const Event& event, uint64_t mask, size_t row);
    void push_duration(const Event& event);
    void push_rest(Texts* column, Event& event);
    void push_lane(Identifiers* column, const Scalar& lane);
    void push_flow_id(const Scalar& id);
    Role role_of(uint32_t cat);
    static void push_text(Identifiers* column, std::string_view token);

    Tables& tables_;
    Troubles& troubles_;
    std::vector<Role> roles_;  // by code of cat
    Dictionary lanes_, flow_ids_;
    size_t marked_lanes_ = 0, marked_flow_ids_ = 0;
    Texts *ph_, *cat_, *name_, *args_, *memory_args_, *lane_names_;
    Numbers<int64_t> *ts_, *dur_;
    Identifiers *pid_, *tid_;
    RowNumbers* position_;
    RowNumbers* event_[kGroupCount] = {};  // of the tables that hang on events
    Column* columns_[kFieldCount] = {};
    Numbers<int32_t>* triples_[2][3] = {};
    Numbers<int64_t> *memory_ts_, *counter_ts_, *flow_ts_;
    Identifiers *memory_pid_, *memory_tid_, *counter_pid_;
    Texts *counter_name_, *counter_series_;
    Numbers<double>* counter_value_;
    Texts *flow_ph_, *flow_cat_, *flow_name_, *flow_args_;
    Identifiers *flow_pid_, *flow_tid_, *flow_id_;
    Texts *meta_kind_, *meta_args_;
    Identifiers *meta_pid_, *meta_tid_;
};

}  // namespace etloom::kineto
