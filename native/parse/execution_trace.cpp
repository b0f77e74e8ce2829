// PyTorch execution traces (Chakra host traces) to columns: schemas 1.0.1 (flat) and 1.0.2 to 1.1.1 (inputs, outputs and
// attrs).
#include "et_node.hpp"
#include "et_tables.hpp"
#include "parser.hpp"
#include "parsers.hpp"

namespace etloom {

namespace {

class ExecutionTraceParser : public Parser {
  public:
    ExecutionTraceParser() : Parser("nodes", false, true, {"id\"", "name\""}) {}
    ~ExecutionTraceParser() override { stop(); }

  protected:
    bool row(Cursor& at, uint64_t position) override {
        et::Node* node = reader_.read(at);
        return node != nullptr && nodes_.add(*node, position);
    }
    const Table& main_table() override { return tables_["nodes"]; }
    std::unique_ptr<Parser> make_second() const override { return std::make_unique<ExecutionTraceParser>(); }
    void order(Worker* worker) override { nodes_.order(worker); }

  private:
    et::NodeReader reader_{troubles_};
    et::NodeTables nodes_{tables_, troubles_};
};

}  // namespace

std::unique_ptr<Parser> execution_trace_parser() { return std::make_unique<ExecutionTraceParser>(); }

}  // namespace etloom
