// Events of a Kineto / Chrome trace as rows. The names of tables and columns are those of etloom/schema.py.
#pragma once
#include <cstdint>
#include <string_view>
#include <vector>

#include "kineto_event.hpp"
#include "parser.hpp"

namespace etloom::kineto {

class EventTables {
  public:
    EventTables(Tables& tables, Troubles& troubles);
    // The rows of one event, which may be changed on the way; or the trouble it is in.
    void add(Event& event, uint64_t position);
    // Events by start, the longest first, then as in the file; and what hangs on them.
    void order(Worker* worker);
    // Gives the texts that name processes, threads and arrows the numbers that they have in `leader`, from which the
    // tables are taken over. An event with another text is not read.
    void learn_names(const EventTables& leader);
    bool is_stuck() const { return is_stuck_; }

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
    void push_lane(Numbers<int64_t>* column, std::string_view token);
    void push_flow_id(std::string_view token);
    Role role_of(uint32_t cat);
    int64_t text_number(Dictionary& texts, std::string_view token);

    Tables& tables_;
    Troubles& troubles_;
    std::vector<Role> roles_;  // by code of cat
    Dictionary lanes_, flow_ids_;
    bool follows_ = false, is_stuck_ = false;
    Texts *ph_, *cat_, *name_, *args_, *memory_args_, *lane_names_;
    Numbers<int64_t> *ts_, *dur_, *pid_, *tid_;
    RowNumbers* position_;
    RowNumbers* event_[kGroupCount] = {};  // of the tables that hang on events
    Column* columns_[kFieldCount] = {};
    Numbers<int32_t>* triples_[2][3] = {};
    Numbers<int64_t> *memory_ts_, *memory_pid_, *memory_tid_;
    Numbers<int64_t> *counter_ts_, *counter_pid_;
    Texts *counter_name_, *counter_series_;
    Numbers<double>* counter_value_;
    Texts *flow_ph_, *flow_cat_, *flow_name_, *flow_args_;
    Numbers<int64_t> *flow_ts_, *flow_pid_, *flow_tid_, *flow_id_;
    Texts *meta_kind_, *meta_args_;
    Numbers<int64_t> *meta_pid_, *meta_tid_;
};

}  // namespace etloom::kineto
