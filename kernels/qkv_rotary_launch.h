#pragma once

#include <cstddef>

#include "qkv_rotary_plan.h"

namespace mrrope {

// What there is of every compiled kernel.
struct QkvLauncher {
    size_t (*workspace)(const QkvRotaryArgs&, const QkvRotaryPlan&);
    void (*launch)(const QkvRotaryArgs&, const QkvRotaryPlan&, void* workspace, CUstream_st* stream);
};

// Of one of qkv_kernels, for float16 or bfloat16.
template <QkvKernel kernel>
QkvLauncher qkv_launcher(DType dtype);

// Asked of the driver once for each device.
int multiprocessors_of_current_device();

}  // namespace mrrope
