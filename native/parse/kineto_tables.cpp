// See kineto_tables.hpp.
#include "kineto_tables.hpp"

#include <string>

#include "ordering.hpp"

namespace etloom::kineto {

namespace {

// No time or length of a trace is larger (146 years), and two of them can be added.
constexpr int64_t kLatest = 4'000'000'000'000'000'000, kLongest = int64_t{1} << 55;

constexpr uint32_t kNoCat = UINT32_MAX;

constexpr auto kMasks = [] {
    std::array<uint64_t, kGroupCount> masks{};
    for (size_t group = 0; group < kGroupCount; ++group) masks[group] = group_mask(static_cast<Group>(group));
    return masks;
}();
constexpr uint64_t mask_of(Group group) { return kMasks[static_cast<size_t>(group)]; }

std::optional<int64_t> thousandths_of(const Scalar& scalar) {
    return scalar.form == Scalar::Form::kThousandths ? scalar.number : thousandths(scalar.token);
}
std::optional<int64_t> time_of(const Scalar& scalar) {
    const auto time = thousandths_of(scalar);
    return time && *time <= kLatest && *time >= -kLatest ? time : std::nullopt;
}

}  // namespace

void Identifiers::append(const Column& other, const Shifts& shifts) {
    const size_t before = size();
    Numbers::append(other, shifts);
    const auto& identifiers = static_cast<const Identifiers&>(other);
    const auto& texts = identifiers.texts_.texts();
    for (size_t code = numbers_of_other_.size(); code < texts.size(); ++code) {
        numbers_of_other_.push_back(kFirst - static_cast<int64_t>(texts_.code(texts[code])));
    }
    for (const uint32_t row : identifiers.rows_of_texts_) {
        int64_t& value = values()[before + row];
        value = numbers_of_other_[static_cast<size_t>(kFirst - value)];
    }
}

EventTables::EventTables(Tables& tables, Troubles& troubles) : tables_(tables), troubles_(troubles) {
    Table& events = tables["events"];
    ph_ = events.add<Texts>("ph", Finish::kUnescape);
    cat_ = events.add<Texts>("cat", Finish::kUnescape);
    name_ = events.add<Texts>("name", Finish::kUnescape);
    ts_ = events.add<Numbers<int64_t>>("ts");
    dur_ = events.add<Numbers<int64_t>>("dur");
    pid_ = events.add<Identifiers>("pid", lanes_);
    tid_ = events.add<Identifiers>("tid", lanes_);
    args_ = events.add<Texts>("args", Finish::kCanonical);
    position_ = events.add<RowNumbers>("position", &Shifts::position);

    Table& memory = tables["memory"];
    memory_ts_ = memory.add<Numbers<int64_t>>("ts");
    memory_pid_ = memory.add<Identifiers>("pid", lanes_);
    memory_tid_ = memory.add<Identifiers>("tid", lanes_);
    memory_args_ = memory.add<Texts>("args", Finish::kCanonical);
    for (size_t group = 0; group < kGroupCount; ++group) {
        if (is_side(static_cast<Group>(group))) event_[group] = tables[kGroupTables[group]].add<RowNumbers>("event", &Shifts::row);
    }
    for (size_t i = 0; i < kFieldCount; ++i) {
        const Field& field = kFields[i];
        if (field.kind == Kind::kIgnored) continue;
        Table& in = tables[kGroupTables[static_cast<size_t>(field.group)]];
        switch (field.kind) {
            case Kind::kText: columns_[i] = in.add<Texts>(field.column, Finish::kUnescape); break;
            case Kind::kJson: columns_[i] = in.add<Texts>(field.column, Finish::kCanonical); break;
            case Kind::kReal: columns_[i] = in.add<Numbers<double>>(field.column); break;
            case Kind::kUnsigned: columns_[i] = in.add<Numbers<uint64_t>>(field.column); break;
            case Kind::kTriple: {
                static constexpr const char* kAxes[2][3] = {{"grid_x", "grid_y", "grid_z"}, {"block_x", "block_y", "block_z"}};
                const size_t which = i == kGrid ? 0 : 1;
                for (size_t axis = 0; axis < 3; ++axis) triples_[which][axis] = in.add<Numbers<int32_t>>(kAxes[which][axis]);
                break;
            }
            default:
                if (field.narrow) {
                    columns_[i] = in.add<Numbers<int32_t>>(field.column);
                } else {
                    columns_[i] = in.add<Numbers<int64_t>>(field.column);
                }
        }
    }

    Table& counters = tables["counters"];
    counter_ts_ = counters.add<Numbers<int64_t>>("ts");
    counter_pid_ = counters.add<Identifiers>("pid", lanes_);
    counter_name_ = counters.add<Texts>("name", Finish::kUnescape);
    counter_series_ = counters.add<Texts>("series", Finish::kUnescape);
    counter_value_ = counters.add<Numbers<double>>("value");

    Table& flows = tables["flows"];
    flow_ph_ = flows.add<Texts>("ph", Finish::kUnescape);
    flow_cat_ = flows.add<Texts>("cat", Finish::kUnescape);
    flow_name_ = flows.add<Texts>("name", Finish::kUnescape);
    flow_ts_ = flows.add<Numbers<int64_t>>("ts");
    flow_pid_ = flows.add<Identifiers>("pid", lanes_);
    flow_tid_ = flows.add<Identifiers>("tid", lanes_);
    flow_id_ = flows.add<Identifiers>("flow", flow_ids_);
    flow_args_ = flows.add<Texts>("args", Finish::kCanonical);

    // Metadata events (ph M): what a process or thread is called. The reader folds them into `threads`.
    Table& metadata = tables["metadata"];
    meta_kind_ = metadata.add<Texts>("kind", Finish::kUnescape);
    meta_pid_ = metadata.add<Identifiers>("pid", lanes_);
    meta_tid_ = metadata.add<Identifiers>("tid", lanes_);
    meta_args_ = metadata.add<Texts>("args", Finish::kCanonical);

    lane_names_ = tables["tracks"].add<Texts>("name", Finish::kUnescape);
}

void EventTables::add(Event& event, uint64_t position) {
    if (event.ph == 'M' || event.ph == 'C') {
        event.ph == 'M' ? add_metadata(event) : add_counter(event);
        return lost(event);
    }
    const auto ts = time_of(event.ts);
    if (event.ph == 0 || !ts) {
        troubles_[event.ph == 0 ? "no_phase" : "no_time"].add(event.name);
    } else if (event.ph == 's' || event.ph == 't' || event.ph == 'f') {
        add_flow(event, *ts);
    } else if (event.ph == 'i' && event.name == "[memory]") {
        add_memory(event, *ts);
    } else {
        add_event(event, *ts, position);
    }
}

void EventTables::lost(Event& event) {
    event.give_back(event.present, troubles_);
    if (!event.id.empty()) event.keep("id", event.id.token, ".", troubles_);
    if (!event.dur.empty()) event.keep("dur", event.dur.token, ".", troubles_);
    if (!event.rest.empty()) troubles_["unstored_args"].add(std::string(event.name) + ": " + event.rest);
}

void EventTables::add_event(Event& event, int64_t ts, uint64_t position) {
    event.give_back(mask_of(Group::kMemory), troubles_);
    const auto row = static_cast<uint32_t>(position_->size());
    const uint32_t cat = event.cat.empty() ? (cat_->null(), kNoCat) : cat_->push_text(event.cat);
    // Host calls carry some arguments of the work they launch (ROCm does): these are no facts of a device event.
    if (event.present & ~mask_of(Group::kEvent)) {
        side(Group::kArguments, event, row, true);
        side(Group::kKernel, event, row, event.ph == 'X' && !event.has(kSyncKind) && role_of(cat) == Role::kOther);
        side(Group::kSync, event, row, event.has(kSyncKind));
        side(Group::kFrame, event, row, event.has(kPythonId));
        side(Group::kComm, event, row, event.has(kCollective) || event.has(kGroupRanks));
    }
    ph_->push_text(event.ph_text);
    name_->push_text_or_null(event.name);
    ts_->push(ts);
    push_duration(event);
    push_lane(pid_, event.pid);
    push_lane(tid_, event.tid);
    push_fields(event, mask_of(Group::kEvent), row);
    if (!event.id.empty()) event.keep("id", event.id.token, ".", troubles_);
    push_rest(args_, event);
    position_->push(static_cast<uint32_t>(position));
}

// The members that no column holds, as the text of an object.
void EventTables::push_rest(Texts* column, Event& event) {
    if (event.rest.empty()) return column->null();
    event.rest.insert(0, 1, '{');
    event.rest.back() = '}';
    column->push_text(event.rest);
}

void EventTables::add_flow(Event& event, int64_t ts) {
    flow_ph_->push_text(event.ph_text);
    flow_cat_->push_text_or_null(event.cat);
    flow_name_->push_text_or_null(event.name);
    flow_ts_->push(ts);
    push_lane(flow_pid_, event.pid);
    push_lane(flow_tid_, event.tid);
    push_flow_id(event.id);
    event.give_back(event.present, troubles_);
    if (!event.dur.empty()) event.keep("dur", event.dur.token, ".", troubles_);
    push_rest(flow_args_, event);
}

// Ends of an arrow share an id; one that is no number becomes one that does not occur, as tracks do.
void EventTables::push_flow_id(const Scalar& id) {
    if (id.form == Scalar::Form::kWhole) return flow_id_->push(id.number);
    const std::string_view token = id.token;
    if (token.empty() || token == "null") {
        troubles_["no_flow_id"].add("");
        return flow_id_->null();
    }
    const auto number = whole(token);
    if (!number) troubles_["text_flow_id"].add(token);
    number ? flow_id_->push(*number) : push_text(flow_id_, token);
}

void EventTables::add_memory(Event& event, int64_t ts) {
    const size_t row = memory_ts_->size();
    memory_ts_->push(ts);
    push_lane(memory_pid_, event.pid);
    push_lane(memory_tid_, event.tid);
    push_fields(event, mask_of(Group::kMemory), row);
    event.give_back(event.present & ~mask_of(Group::kMemory), troubles_);
    if (!event.id.empty()) event.keep("id", event.id.token, ".", troubles_);
    if (!event.dur.empty()) event.keep("dur", event.dur.token, ".", troubles_);
    push_rest(memory_args_, event);
}

void EventTables::add_counter(const Event& event) {
    const auto ts = time_of(event.ts);
    bool read = false;
    for (const auto& [series, token] : event.samples) {
        const auto value = real(token);
        if (!ts || !value) {
            troubles_["invalid_counter"].add(token);
            continue;
        }
        read = true;
        counter_ts_->push(*ts);
        push_lane(counter_pid_, event.pid);
        counter_name_->push_text_or_null(event.name);
        counter_series_->push_text(series);
        counter_value_->push(*value);
    }
    troubles_[read ? "counter_events" : "no_counter"].add(event.name);
}

void EventTables::add_metadata(const Event& event) {
    if (event.args.empty()) {
        troubles_["empty_metadata"].add(event.name);
        return;
    }
    troubles_["metadata_events"].add(event.name);
    meta_kind_->push_text_or_null(event.name);
    push_lane(meta_pid_, event.pid);
    push_lane(meta_tid_, event.tid);
    meta_args_->push_text(event.args);
}

void EventTables::push_lane(Identifiers* column, const Scalar& lane) {
    if (lane.form == Scalar::Form::kWhole) return column->push(lane.number);
    const std::string_view token = lane.token;
    if (token.empty() || token == "null") return column->null();
    if (const auto number = whole(token)) return column->push(*number);
    if (!is_text(token)) troubles_["unexpected_type"].add("pid or tid: " + std::string(token.substr(0, 200)));
    push_text(column, token);
}

void EventTables::push_duration(const Event& event) {
    if (event.dur.form == Scalar::Form::kThousandths && event.dur.number < kLongest) return dur_->push(event.dur.number);
    if (event.dur.empty() || event.dur.token == "null") {
        if (event.ph == 'X') troubles_["no_duration"].add(event.name);
        return dur_->null();
    }
    const auto length = thousandths_of(event.dur);
    if (!length || *length < 0 || *length >= kLongest) {
        const char* trouble = length && *length < 0 ? "negative_duration" : "invalid_duration";
        troubles_[trouble].add(std::string(event.name) + ": " + std::string(event.dur.token));
        return dur_->null();
    }
    dur_->push(*length);
}

// A row of a side table, if the event has any of its fields and is of the sort the table describes; else the fields go
// to `args`, as any that no table knows.
void EventTables::side(Group group, Event& event, uint32_t row, bool wanted) {
    const uint64_t mask = mask_of(group);
    if ((event.present & mask) == 0) return;
    if (!wanted) return event.give_back(mask, troubles_);
    RowNumbers* events = event_[static_cast<size_t>(group)];
    events->push(row);
    push_fields(event, mask, events->size() - 1);
}

void EventTables::push_fields(const Event& event, uint64_t mask, size_t row) {
    for (uint64_t left = event.present & mask; left != 0; left &= left - 1) {
        const auto i = static_cast<size_t>(__builtin_ctzll(left));
        const Value& value = event.values[i];
        Column* column = columns_[i];
        switch (kFields[i].kind) {
            case Kind::kTriple:
                for (size_t axis = 0; axis < 3; ++axis) triples_[i == kGrid ? 0 : 1][axis]->push_at(row, value.triple[axis]);
                break;
            case Kind::kText: static_cast<Texts*>(column)->push_text_at(row, inside(value.token)); break;
            case Kind::kJson: static_cast<Texts*>(column)->push_text_at(row, value.token); break;
            case Kind::kReal: static_cast<Numbers<double>*>(column)->push_at(row, value.real); break;
            case Kind::kUnsigned: static_cast<Numbers<uint64_t>*>(column)->push_at(row, value.natural); break;
            default:
                if (kFields[i].narrow) {
                    static_cast<Numbers<int32_t>*>(column)->push_at(row, static_cast<int32_t>(value.whole));
                } else {
                    static_cast<Numbers<int64_t>*>(column)->push_at(row, value.whole);
                }
        }
    }
}

void EventTables::push_text(Identifiers* column, std::string_view token) {
    const std::string_view text = is_text(token) ? inside(token) : token;
    const bool is_plain = !is_text(token) || text.find('\\') == std::string_view::npos;
    column->push_text(is_plain ? text : std::string_view(unescape(text)));
}

EventTables::Role EventTables::role_of(uint32_t code) {
    if (code == kNoCat) return Role::kOther;
    while (roles_.size() <= code) {
        const std::string_view cat = cat_->text(static_cast<uint32_t>(roles_.size()));
        bool host = cat.ends_with("_runtime") || cat.ends_with("_driver");
        for (const std::string_view name : {"cpu_op", "user_annotation", "python_function", "overhead", "Trace"}) host |= cat == name;
        roles_.push_back(host ? Role::kHost : Role::kOther);
    }
    return roles_[code];
}

void EventTables::order(Worker* worker) {
    for (const auto& name : lanes_.texts()) lane_names_->push_text(name);
    Table& events = tables_["events"];
    const auto& ts = ts_->values();
    const auto& dur = dur_->values();
    Buffer<uint32_t> order;
    const auto sort_events = [&] {
        auto sorted = sorting_order(events.rows(), [&](uint32_t a, uint32_t b) {
            return ts[a] != ts[b] ? ts[a] < ts[b] : dur[a] > dur[b];
        });
        order.swap(sorted);
    };
    const auto sort_others = [&] {
        sort_by(tables_["memory"], memory_ts_->values());
        sort_by(tables_["counters"], counter_ts_->values());
        sort_by(tables_["flows"], flow_ts_->values());
    };
    run_both(worker, sort_others, sort_events);
    if (order.empty()) return;
    const auto place = places(order);
    events.take(order, worker);
    const auto follow_events = [&](size_t first) {
        for (size_t group = first; group < kGroupCount; group += 2) {
            if (event_[group] != nullptr) follow(tables_[kGroupTables[group]], event_[group]->values(), order, place);
        }
    };
    run_both(worker, [&] { follow_events(1); }, [&] { follow_events(0); });
}

}  // namespace etloom::kineto
