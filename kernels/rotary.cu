#include "rotary_kernel.cuh"

namespace mrrope {
namespace {

template <class F>
void with_element(DType dtype, F&& f) {
    switch (dtype) {
        case DType::float64: return f(double{});
        case DType::float32: return f(float{});
        case DType::float16: return f(cutlass::half_t{});
        case DType::bfloat16: return f(cutlass::bfloat16_t{});
    }
}

}  // namespace

void rotary_cuda(const RotaryArgs& args, CUstream_st* stream) {
    const RotaryShape shape = shape_of(args);
    if (shape.batch == 0 || shape.tokens == 0 || shape.heads == 0) return;
    const RotaryPlan plan = plan_rotary(shape);
    with_element(args.dtype, [&](auto element) {
        for_each_launch(args, plan,
                        [&](const RotaryArgs& part) { launch_rotary<decltype(element)>(part, plan, stream); });
    });
}

}  // namespace mrrope
