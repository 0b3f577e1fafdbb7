#pragma once

#include <cstddef>

#include "qkv_rotary_plan.h"

namespace mrrope {

// What there is of every compiled kernel.
struct QkvLauncher {
    size_t (*workspace)(const QkvRotaryArgs&, const QkvRotaryPlan&);
    void (*launch)(const QkvRotaryArgs&, const QkvRotaryPlan&, void* workspace, CUstream_st* stream);
};

// Of a kernel of this pairing, for float16 or bfloat16.
template <Pairing pairing>
QkvLauncher qkv_launcher(int kernel, DType dtype);

// Asked of the driver once for each device.
int multiprocessors_of_current_device();

}  // namespace mrrope
