#pragma once

#include <cstddef>

#include "qkv_rotary_plan.h"

namespace mrrope {

// The host entry points of a compiled kernel.
struct QkvLauncher {
    size_t (*workspace)(const QkvRotaryArgs&, const QkvRotaryPlan&);
    void (*launch)(const QkvRotaryArgs&, const QkvRotaryPlan&, void* workspace, CUstream_st* stream);
};

// For one of qkv_kernels; float16 or bfloat16.
template <QkvKernel kernel>
QkvLauncher qkv_launcher(DType dtype);

}  // namespace mrrope
