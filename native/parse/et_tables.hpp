// Nodes of an execution trace as rows. The names of tables and columns are those of src/etloom/core/schema.py.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "et_node.hpp"
#include "et_types.hpp"
#include "parser.hpp"

namespace etloom::et {

class NodeTables {
  public:
    NodeTables(Tables& tables, Troubles& troubles);
    // The rows of one node, or the trouble it is in. False: a list of it is damaged.
    bool add(Node& node, uint64_t position);
    // Nodes by id, the order in which operators began; and what hangs on them.
    void order(Worker* worker);

  private:
    // The types of a list of arguments.
    struct Types {
        std::vector<Type> items;
        bool hold_tensor = false;
    };
    struct Place {
        uint32_t node;
        size_t io, index;
    };

    void push_field(size_t row, Node& node, size_t field);
    void push_whole(Numbers<int64_t>* column, size_t row, Node& node, std::string_view key, std::string_view token, Kind kind);
    bool arguments(uint32_t node, size_t io, const Side& side);
    bool argument(const Place& place, const Type& type, Cursor& value, List& shapes, List& strides);
    bool list(const Place& place, const Type& type, Cursor& value, List& shapes, List& strides);
    bool tensor(const Place& place, const Type& type, Cursor& value, List& shapes, List& strides);
    const Types& types_of(size_t io, uint32_t code);
    void number_dtypes(Type& type);

    Tables& tables_;
    Troubles& troubles_;
    std::vector<Types> parsed_types_[2];  // by code of the texts in types_
    std::string left_;                    // the values that are being read, without the tensors
    int32_t item_number_ = -1;

    Numbers<int64_t> *et_id_, *parent_;
    RowNumbers* file_order_;
    Texts *name_, *values_[2], *types_[2], *attrs_;
    Column* columns_[kFieldCount] = {};
    RowNumbers* comm_node_;
    RowNumbers* tensor_node_;
    Numbers<int8_t>* io_;
    Numbers<int16_t>* index_;
    Numbers<int32_t>* item_;
    Numbers<int64_t>* tensor_numbers_[4];
    Numbers<int32_t>* itemsize_;
    Texts *device_, *dtype_, *shape_, *stride_;
};

}  // namespace etloom::et
