#include <ATen/ATen.h>
#include <mrrope/torch_ops.h>

#include <cstdio>

// Rotate q and k with the registered torch op, forward, backward and in place, and compare with the formula.
namespace {

at::Tensor rotated(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
    const auto halves = x.chunk(2, -1);
    return at::cat({halves[0] * cos - halves[1] * sin, halves[1] * cos + halves[0] * sin}, -1);
}

double difference(const at::Tensor& a, const at::Tensor& b) {
    return (a - b).abs().max().item<double>();
}

}  // namespace

int main() {
    const mrrope::FrequencyTable t = mrrope::build_table({.method = mrrope::Method::mrrope_pro,
                                                          .rotary_dim = 64,
                                                          .base = 5e5,
                                                          .original_max_position = 8192,
                                                          .scale = 16});
    const at::Tensor table = mrrope::packed_tensor(t, at::kCPU);
    const at::Tensor positions = at::arange(100, 109, at::kLong);
    const at::Tensor q = at::randn({2, 4, 9, 64}, at::kDouble).requires_grad_();
    const at::Tensor k = at::randn({2, 2, 9, 64}, at::kDouble).requires_grad_();
    const std::vector<at::Tensor> result = mrrope::rotary({q, k}, positions, table);

    const at::Tensor frequencies = at::tensor(t.inv_freq, at::kDouble);
    const at::Tensor angles = positions.to(at::kDouble).unsqueeze(1) * frequencies;
    const at::Tensor cos = angles.cos() * t.attention_factor;
    const at::Tensor sin = angles.sin() * t.attention_factor;
    double worst = difference(result[0], rotated(q, cos, sin));
    worst = std::max(worst, difference(result[1], rotated(k, cos, sin)));

    const at::Tensor weights = at::randn_like(result[0]);
    (result[0] * weights).sum().backward();
    worst = std::max(worst, difference(q.grad(), rotated(weights, cos, -sin)));
    const bool k_has_gradient = k.grad().defined() && k.grad().abs().max().item<double>() != 0.0;

    const at::Tensor in_place = q.detach().clone();
    mrrope::rotary_({in_place}, positions, table);
    worst = std::max(worst, difference(in_place, result[0]));

    std::printf("mrrope::torch: forward, backward and in place, largest error %.1e\n", worst);
    return worst < 1e-12 && !k_has_gradient ? 0 : 1;
}
