// Refuses a step whose counts or indices lie outside the tensors they index, before anything is computed.
#pragma once
#include <string>

#include "abi.h"

struct StepCounts {
    int32_t tokens, sequences, rows;
};

bool check_step(const Node* nodes, int32_t count, const StepCounts& step, std::string* error);
