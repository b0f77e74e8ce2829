// Kineto / Chrome trace JSON to columns.
#include "kineto_event.hpp"
#include "kineto_tables.hpp"
#include "parser.hpp"
#include "parsers.hpp"

namespace etloom {

namespace {

class KinetoParser : public Parser {
  public:
    KinetoParser()
        : Parser("traceEvents", true, false,
                 {"ph\"", "name\"", "cat\"", "pid\"", "tid\"", "ts\"", "dur\"", "id\"", "args\"", "s\"", "bp\""}) {}

    ~KinetoParser() override { stop(); }

  protected:
    bool row(Cursor& at, uint64_t position) override {
        return add(reader_.read(at), position);
    }
    bool known_row(const char*& at, const char* to, uint64_t position) override {
        return add(reader_.read_known(at, to), position);
    }
    void learn(std::string_view row, const Cursor& at) override { reader_.learn(row, at); }
    void mark_texts() override { events_.mark_identifiers(); }
    void truncate_texts() override { events_.truncate_identifiers(); }
    const Table& main_table() override { return tables_["events"]; }
    std::unique_ptr<Parser> make_second() const override { return std::make_unique<KinetoParser>(); }
    void order(Worker* worker) override { events_.order(worker); }

  private:
    bool add(kineto::Event* event, uint64_t position) {
        if (event != nullptr) events_.add(*event, position);
        return event != nullptr;
    }

    kineto::EventReader reader_{troubles_};
    kineto::EventTables events_{tables_, troubles_};
};

}  // namespace

std::unique_ptr<Parser> kineto_parser() { return std::make_unique<KinetoParser>(); }

}  // namespace etloom
